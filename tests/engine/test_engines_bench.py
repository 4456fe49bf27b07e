"""The A/B of engines: same tokens from the same weights, ties told from errors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from engine.bench.engines import (
    Difference,
    Outcome,
    Process,
    as_json,
    compare,
    hub_folder,
    interpreter,
    table,
)
from engine.bench.engines_peer import OPENERS, open_light, open_transformers
from engine.errors import EngineError
from engine.model.checkpoint.save import save_model
from tests.engine.adapters.tiny_hub import LLAMA, make_policy, save_tiny

UNTIED = LLAMA.model_copy(update={"tie_word_embeddings": False})
"""With a tied head a random model says its last token again, whatever its layers compute."""


def run(names: list[str], folders: dict[str, Path], num_prompts: int = 50) -> list[Outcome]:
    with hub_folder(folders[names[0]]) as (_, prompts, _label):
        assert len(prompts) == 50
        engines = compare(names, lambda n: OPENERS[n](folders[n], 1), prompts[:num_prompts], 12)
        return list(engines)


def test_engines_sample_the_same_greedy_tokens(tmp_path: Path):
    """LightEngine both ways and transformers: 50 prompts, none differs."""
    folder = save_tiny(UNTIED, tmp_path / "model")
    names = ["light", "light-exact", "transformers"]
    outcomes = run(names, dict.fromkeys(names, folder))
    assert [outcome.engine for outcome in outcomes] == names
    assert not any(outcome.num_unexplained for outcome in outcomes)
    assert all(outcome.alone > 0 and outcome.together > 0 for outcome in outcomes)
    told = as_json(outcomes, "tiny", 12)
    assert [row["unexplained"] for row in told["engines"]] == [0, 0, 0]
    assert table(outcomes)[1].startswith("light ")


def test_the_tokens_compared_are_not_all_one(tmp_path: Path):
    """Agreement about a text that repeats itself would say little."""
    engine = open_light(save_tiny(UNTIED, tmp_path / "model"), 1, False)
    try:
        texts, _ = engine.play([[place, 2 * place + 1] for place in range(20)], 12, 16)
    finally:
        engine.close()
    assert len({tuple(text) for text in texts}) > 15
    assert sum(len(set(text)) for text in texts) / len(texts) > 4


def test_other_weights_are_no_tie(tmp_path: Path):
    """The first token that differs is named, with the gap that each engine sees."""
    save_model(make_policy(UNTIED, 0), tmp_path / "a")
    save_model(make_policy(UNTIED, 1), tmp_path / "b")
    folders = {"light": tmp_path / "a", "transformers": tmp_path / "b"}
    last = run(["light", "transformers"], folders, 8)[1]
    assert last.num_unexplained > 4
    found = last.differences[0]
    assert max(found.gaps) >= 1e-3 and not found.is_tie
    assert found.tokens[0] != found.tokens[1]
    assert any("NO tie" in line for line in table([last]))


def test_a_tie_is_told_as_one(tmp_path: Path):
    """Two rows of the head are the same but for rounding, in another order in each engine."""
    for folder, larger in (("a", 5), ("b", 6)):
        model = make_policy(UNTIED, 0)
        with torch.no_grad():
            head = model.state_dict()["lm_head"]
            row = head[5].clone()
            head.zero_()
            head[5:7] = row
            head[larger] *= 1 + 1e-5
        save_model(model, tmp_path / folder)
    folders = {"light": tmp_path / "a", "transformers": tmp_path / "b"}
    last = run(["light", "transformers"], folders, 8)[1]
    assert last.differences and not last.num_unexplained
    assert {difference.tokens for difference in last.differences} == {(5, 6)}
    assert all(0 <= max(difference.gaps) < 1e-3 for difference in last.differences)


@pytest.mark.parametrize("gap", [math.nan, math.inf, 1e-3])
def test_what_cannot_be_seen_is_no_tie(gap: float):
    assert not Difference(0, 0, (1, 2), (0.0, gap)).is_tie


def test_an_engine_without_environment_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PARL_ENGINES", str(tmp_path))
    with pytest.raises(EngineError, match=r"engine-venvs\.sh vllm"):
        interpreter("vllm")


@pytest.mark.slow
def test_processes_answer_like_players(tmp_path: Path):
    """The same tokens and logprobs through the pipe; a folder without a model is one line."""
    folder = save_tiny(UNTIED, tmp_path / "model")
    prompts = [[3, 4, 5], [7, 8]]
    for name, opener in (("light", lambda f, t: open_light(f, t, False)),
                         ("transformers", open_transformers)):  # fmt: skip
        here, there = opener(folder, 1), Process(name, folder, 1)
        try:
            assert here.version == there.version
            assert here.play(prompts, 6, 2)[0] == there.play(prompts, 6, 2)[0]
            asked = ([3, 4, 5], [1, 2])
            assert here.logprobs_of(*asked) == pytest.approx(there.logprobs_of(*asked))
        finally:
            here.close()
            there.close()
    with pytest.raises(EngineError, match="light ended"):
        Process("light", tmp_path / "nothing", 1)
