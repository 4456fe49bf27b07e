"""How many far tokens must be read? Measured on a user's own model and text.

Two curves by k (facts/kv-attention.md 2.1): the share of true far attention mass that lies in the
tokens which the key-code index picks, and the digits of hidden numbers that the model still says.
Mass alone misleads: block methods catch 89 % of it and lose the needles. So the needles decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.attention.config import HybridConfig
from engine.bench.kv_probe import Probe, score_needles
from engine.bench.kv_reading import Needles, prefill
from engine.bench.kv_texts import needle_task, token_ids
from engine.chat.base import Tokenizer
from engine.errors import EngineError
from engine.model.model import PolicyModel

KS = (16, 32, 64, 128, 256, 512)
NLL_MARGIN = 0.1
"""Nats a digit that a choice may lose against full attention."""
TELLING = 0.5
"""Nats that window-only must lose, or the needles tell nothing."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """mass, needles: by k. full, blind: needles under full attention and under sink and window
    alone. far_share: far tokens' share of all attention, the mean over heads and queries."""

    mass: dict[int, float]
    needles: dict[int, Needles]
    full: Needles
    blind: Needles
    far_share: float
    context: int
    window: int

    @property
    def recommended(self) -> int | None:
        """Smallest k whose needles are as good as full attention's, as are those of all larger k;
        None when none is, or when the model cannot find the needles anyway."""
        if self.blind.nll - self.full.nll < TELLING:
            return None
        found = None
        for k in sorted(self.needles, reverse=True):
            if self.needles[k].nll - self.full.nll > NLL_MARGIN:
                break
            found = k
        return found


def with_budget(config: HybridConfig, topk: int) -> HybridConfig:
    """Another k, with four candidates for each token that is read, as the default has."""
    return config.model_copy(update={"topk": topk, "candidates": max(256, 4 * topk)})


def calibrate(
    model: PolicyModel,
    tokenizer: Tokenizer,
    text: str,
    *,
    context: int,
    window: int,
    ks: Sequence[int] = KS,
    num_needles: int = 12,
    num_questions: int = 6,
    num_queries: int = 64,
) -> Calibration:
    """Prefills the text's first ``context`` tokens, needles among them, with full attention. Mass
    is measured on the ``num_queries`` tokens that follow. EngineError when the text is too short
    or the window leaves nothing far."""
    far_end = context - window - 128
    if far_end < 256:
        raise EngineError(
            f"window {window} leaves {max(0, far_end)} far tokens of a context of {context}; take "
            "a context of at least window + 384"
        )
    task = needle_task(
        text,
        tokenizer,
        context,
        far_end=far_end,
        num_needles=num_needles,
        num_questions=num_questions,
    )
    follow = token_ids(text, tokenizer, context + num_queries, "given")[-num_queries:]
    stored = prefill(model, task.context)
    base = HybridConfig(window=window)
    by_k = {k: with_budget(base, k) for k in ks}
    mass, far_share = far_mass(Probe(model, stored, [follow], window), by_k)
    questions = task.questions
    probe = Probe(model, stored, [question.ids[:-1] for question in questions], window)
    blind = base.model_copy(update={"index": "none"})
    return Calibration(
        mass=mass,
        needles={k: score_needles(model, probe, questions, config) for k, config in by_k.items()},
        full=score_needles(model, probe, questions, None),
        blind=score_needles(model, probe, questions, blind),
        far_share=far_share,
        context=context,
        window=window,
    )


@torch.no_grad()
def far_mass(probe: Probe, by_k: dict[int, HybridConfig]) -> tuple[dict[int, float], float]:
    """Share of far attention mass in what each budget chooses, by k, and far mass as a share of
    all; means over layers, queries and heads. Queries are those of full attention."""
    caught = dict.fromkeys(by_k, 0.0)
    far_share = 0.0
    queries, new_keys = probe.queries()
    for layer, (q, own) in enumerate(zip(queries, new_keys, strict=True)):
        weights = probe.weights(layer, q, own)
        far = weights * probe.far[:, None, None]
        total = far.sum(-1).clamp(min=1e-30)
        far_share += float(far.sum(-1).mean())
        logits, scan = probe.logits(layer, q), probe.scan(layer, q)
        for k, config in by_k.items():
            picked = (far * probe.chosen(logits, scan, config)).sum(-1)
            caught[k] += float((picked / total).mean())
    num = len(queries)
    return {k: share / num for k, share in caught.items()}, far_share / num


def report(found: Calibration) -> Iterator[str]:
    questions = len(found.full.by_question)
    yield (
        f"context {found.context}, window {found.window}; far tokens hold {found.far_share:.1%} of "
        f"attention; {questions} hidden numbers asked for"
    )
    yield f"{'k':>6}{'far mass':>10}{'NLL/digit':>11}{'digits':>8}{'numbers':>9}"

    def line(name: str, mass: str, row: Needles) -> str:
        numbers = f"{row.numbers}/{questions}"
        return f"{name:>6}{mass:>10}{row.nll:>11.3f}{row.accuracy:>8.0%}{numbers:>9}"

    yield line("none", "0.0%", found.blind)
    for k, share in found.mass.items():
        yield line(str(k), f"{share:.1%}", found.needles[k])
    yield line("full", "100.0%", found.full)
    best = found.recommended
    if best is not None:
        yield (
            f"recommended: topk = {best}, candidates = {max(256, 4 * best)}: the smallest whose "
            f"needles stay within {NLL_MARGIN:g} nats a digit of full attention"
        )
    elif found.blind.nll - found.full.nll < TELLING:
        yield (
            "no recommendation: this model does not find the numbers with full attention either; "
            "take a shorter context or a larger model"
        )
    else:
        yield (
            f"no recommendation: even k = {max(found.mass)} loses more than {NLL_MARGIN:g} nats a "
            "digit; take a larger k or full attention"
        )
