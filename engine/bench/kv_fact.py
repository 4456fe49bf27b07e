"""A number early in a long context, cold, re-warmed, and after ten rounds of both.

``python -m engine.bench.kv_fact [--context 7168]``: SmolLM2-135M's keys and values of a needle
context (engine.bench.kv_texts) are written into a TieredKV whose old blocks lie in a file; the
question is then answered through the cache by hybrid attention, row by row as LightEngine does it.
Before the re-warm the number cannot be known, after it it can, and ten rounds of evicting and
re-warming change no digit. 7K tokens is what this model was trained for; ``--tokens 100000`` tells
the same of LightEngine with a policy built by hand (engine.bench.kv_distance).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.config import HybridConfig
from engine.attention.retrieve import selection_width
from engine.bench import kv_distance
from engine.bench.kv_quality import cache_folder
from engine.bench.kv_reading import Prefill, cached_prefill
from engine.bench.kv_texts import DIGITS, HAYSTACK, Question, needle_task, smollm2
from engine.chat.load import load_tokenizer
from engine.errors import EngineError
from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout
from engine.kvcache.quantise import BLOCK
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import State
from engine.light.hybrid_rows import HybridRows, through_torch
from engine.model.checkpoint.load import load_model
from engine.model.model import PolicyModel

CHUNK = 512
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """nll: nats a digit; right: digits that are the most likely next token; digits: those."""

    nll: float
    right: int
    digits: str


class ColdFacts:
    """A context in a cache of three tiers. ``warm``: coded tokens on the device at a time."""

    def __init__(
        self, model: PolicyModel, context: Prefill, window: int, warm: int, directory: Path
    ) -> None:
        config = model.config
        self._model, self._num_tokens = model, len(context.token_ids)
        self._hybrid = HybridConfig(window=window, dense_below=0)
        layout = CacheLayout.of(config, "k8v8")
        tiers = TierConfig(
            hot=window, warm=warm, cold="disk", directory=directory, host_bytes=0, debug_nan=True
        )
        blocks = self._num_tokens // BLOCK + 8
        in_flight = CHUNK // BLOCK + 8
        self.kv = TieredKV(
            layout,
            tiers,
            num_full=window // BLOCK + 2 * in_flight,
            num_warm=blocks + in_flight,
            model_id="kv_fact",
        )
        self._through_torch = through_torch(self.kv, self._hybrid)
        self.kv.open("context")
        for start in range(0, self._num_tokens, CHUNK):
            here = slice(start, min(start + CHUNK, self._num_tokens))
            with self.kv.step([("context", range(here.start, here.stop))]) as step:
                for layer, (k, v) in enumerate(zip(context.keys, context.values, strict=True)):
                    self.kv.write(layer, step, k[here], None if v is None else v[here])
        self.kv.settle()

    def is_cold(self, position: int) -> bool:
        """Whether a block that the fact at ``position`` reaches into is."""
        states = self.kv.states("context")
        blocks = states[position // BLOCK : (position + BLOCK - 1) // BLOCK + 1]
        return any(state in (State.COLD_HOST, State.COLD_DISK) for state in blocks)

    def rewarm(self, position: int) -> None:
        """The block at ``position`` and the next, which a fact may reach into."""
        self.kv.rewarm("context", position, position + BLOCK)

    def evict(self, position: int) -> None:
        self.kv.evict("context", position, position + BLOCK, to="cold")

    @torch.no_grad()
    def ask(self, question: Question, tokens: dict[int, str]) -> Answer:
        """On a fork, so that the context stays as it is. ``tokens``: digits by id."""
        self.kv.fork("context", "asking")
        ids = question.ids[:-1]
        positions = list(range(self._num_tokens, self._num_tokens + len(ids)))
        config = self._model.config
        heads = config.num_attention_heads // config.cached_heads
        shape = (
            config.num_hidden_layers,
            config.cached_heads,
            heads,
            selection_width(self._hybrid),
        )
        rows = HybridRows(
            self.kv, self._hybrid, shape, self._through_torch, [("asking", positions)]
        )
        absorbed = config.is_mla
        hidden, _ = self._model(
            torch.tensor(ids), torch.tensor(positions), rows.attend, absorbed=absorbed
        )
        rows.finish()
        self.kv.release("asking")
        logprobs = self._model.logits(hidden[-DIGITS:]).log_softmax(-1)
        label = torch.tensor(question.ids[-DIGITS:])
        best = logprobs.argmax(-1)
        nll = -float(logprobs.gather(1, label[:, None]).mean())
        said = "".join(tokens.get(int(i), "?") for i in best)
        return Answer(nll, int((best == label).sum()), said)


@dataclass(frozen=True, slots=True)
class Story:
    """One fact's way; ``last`` is the answer after ``ROUNDS`` evictions and re-warms more."""

    question: Question
    was_cold: bool
    cold: Answer
    warm: Answer
    last: Answer


def story(
    facts: ColdFacts, question: Question, tokens: dict[int, str], rounds: int = ROUNDS
) -> Story:
    position = question.position
    was_cold = facts.is_cold(position)
    cold = facts.ask(question, tokens)
    facts.rewarm(position)
    warm = facts.ask(question, tokens)
    for _ in range(rounds):
        facts.evict(position)
        assert facts.is_cold(position), "evicted"
        facts.rewarm(position)
    return Story(question, was_cold, cold, warm, facts.ask(question, tokens))


def report(stories: list[Story], digits: dict[int, str]) -> Iterator[str]:
    yield f"{'token':>6}  {'number':<8}{'cold':<16}{'re-warmed':<16}after {ROUNDS} rounds"
    for found in stories:
        label = "".join(digits[i] for i in found.question.ids[-DIGITS:])
        answers = (found.cold, found.warm, found.last)
        cells = "".join(f"{a.digits} {a.nll:<9.3f}" for a in answers)
        state = "" if found.was_cold else "  (was not cold)"
        yield f"{found.question.position:>6}  {label:<8}{cells}{state}"
    pairs = [(a, b) for s in stories for a, b in zip(s.warm.digits, s.last.digits, strict=True)]
    changed = sum(a != b for a, b in pairs)
    yield f"digits that {ROUNDS} rounds changed: {changed} of {len(pairs)}"
    known = sum(s.warm.right for s in stories), sum(s.cold.right for s in stories)
    yield f"digits right: {known[1]} of {len(pairs)} while cold, {known[0]} re-warmed"


def _far(tokens: int) -> None:
    torch.set_num_threads(1)
    warm = BLOCK * (tokens // 6 // BLOCK)
    positions = [1000, tokens // 40, tokens // 12, tokens // 3, tokens // 2, tokens * 11 // 20]
    try:
        with tempfile.TemporaryDirectory() as directory:
            story = kv_distance.tell(
                [tokens * 3 // 5, tokens * 4 // 5, tokens],
                positions,
                warm=warm,
                directory=Path(directory),
                attention={"hybrid": {"dense_below": 0}},
            )
    except EngineError as error:
        sys.exit(f"kv_fact: {error}")
    sys.stdout.write(f"hand-built policy of two layers, {warm} coded tokens on the device\n")
    for line in kv_distance.report(story):
        sys.stdout.write(line + "\n")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=7168)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--tokens", type=int, help="the far story, at 60, 80 and 100 % of them")
    options = parser.parse_args()
    if options.tokens is not None:
        _far(options.tokens)
        return
    try:
        path = smollm2()
        tokenizer, model = load_tokenizer(path), load_model(path).eval()
        far_end = options.context - options.window - 128
        task = needle_task(
            HAYSTACK(), tokenizer, options.context, far_end=far_end, at=min(1000, far_end // 4)
        )
    except EngineError as error:
        sys.exit(f"kv_fact: {error}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    context = cached_prefill(model, digest, task.context, options.cache)
    digits = {tokenizer.encode(d)[-1]: d for d in "0123456789"}
    with tempfile.TemporaryDirectory() as directory:
        warm = BLOCK * (far_end // 2 // BLOCK)
        facts = ColdFacts(model, context, options.window, warm, Path(directory))
        early = [q for q in task.questions if facts.is_cold(q.position)]
        stories = [story(facts, question, digits) for question in early]
        facts.kv.close()
    sys.stdout.write(f"SmolLM2-135M, context {options.context}, window {options.window}, ")
    sys.stdout.write(f"{warm} warm tokens on the device, older ones in a file\n")
    for line in report(stories, digits):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
