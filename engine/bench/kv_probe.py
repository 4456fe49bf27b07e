"""Many questions about one prefilled context at once, each read as a decode step would read it.

engine.bench.kv_reading asks one question at a time and codes the whole context anew for each, layer
by layer: 4K tokens take most of an hour. Here a layer's codes are made once, the rows of all
questions go through the model together, and one scan serves all budgets k. The choice is that of
engine.attention.retrieve; only sums are rounded in another order.

Shapes: T context tokens, R rows of all questions, A query heads, G key-value heads, P = A / G, D
key size, V value size, N coded tokens (positions 32 .. 32 + N - 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.codes import scan_codes
from engine.attention.config import HybridConfig
from engine.attention.select import choose, share_scores, top_positions
from engine.attention.topology import far_mask, warm_end
from engine.attention.view import WarmBlocks, dense_keys
from engine.bench.kv_reading import Needles, Prefill
from engine.bench.kv_texts import DIGITS, Question
from engine.errors import EngineError
from engine.kvcache.quantise import BLOCK, dequantise_keys, fake_quantise_values, quantise_keys
from engine.model.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Coded:
    """A layer's context: keys [G, T, D] and values [G, T, V] as they are, and as they read from
    codes in ``coded_k``, ``coded_v`` (the sink and the last tokens are not coded there)."""

    k: Tensor
    v: Tensor
    coded_k: Tensor
    coded_v: Tensor
    warm: WarmBlocks | None

    @classmethod
    def of(cls, k: Tensor, v: Tensor | None, end: int, value_dim: int) -> Coded:
        """k [T, G, D], v [T, G, V] or None in latent attention; coded up to position ``end``."""
        keys = k.transpose(0, 1).contiguous()
        values = keys[..., :value_dim] if v is None else v.transpose(0, 1).contiguous()
        if end <= BLOCK:
            return cls(keys, values, keys, values, None)

        def blocks(x: Tensor) -> Tensor:
            return x[:, BLOCK:end].unflatten(1, (-1, BLOCK)).transpose(0, 1)

        def with_codes(x: Tensor, coded: Tensor) -> Tensor:
            flat = coded.transpose(0, 1).flatten(1, 2)
            return torch.cat([x[:, :BLOCK], flat, x[:, end:]], 1)

        codes = quantise_keys(blocks(keys))
        coded_k = with_codes(keys, dequantise_keys(codes))
        if v is None:
            coded_v = coded_k[..., :value_dim]
        else:
            coded_v = with_codes(values, fake_quantise_values(blocks(values), "k8v8"))
        slots = torch.arange(end // BLOCK - 1)
        warm = WarmBlocks(dense_keys(codes), None, slots + 1, slots)
        return cls(keys, values, coded_k, coded_v, warm)


class Probe:
    """``window`` is the hot zone too. EngineError when a question is longer than the window."""

    def __init__(
        self, model: PolicyModel, context: Prefill, rows: Sequence[Sequence[int]], window: int
    ) -> None:
        """``rows``: token ids of each question, all of which follow the context."""
        longest = max(map(len, rows))
        if longest > window:
            raise EngineError(
                f"a question of {longest} tokens is longer than the window of {window}; take a "
                "longer window"
            )
        total = len(context.token_ids)
        self._model, self._window = model, window
        self.ids = torch.tensor([i for row in rows for i in row])
        self.lengths = torch.cat([torch.arange(len(row)) for row in rows]) + total + 1
        owner = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(r) for r in rows]))
        own = owner[:, None] == owner
        self._own = own & (self.lengths[:, None] >= self.lengths)
        positions = torch.arange(total)
        self._warm_ends = torch.tensor([warm_end(int(t), window) for t in self.lengths])
        end = min(int(self._warm_ends.max()), total // BLOCK * BLOCK)
        value_dim = model.config.cached_value_dim
        self.layers = [
            Coded.of(k, v, end, value_dim)
            for k, v in zip(context.keys, context.values, strict=True)
        ]
        self._is_coded = (positions >= BLOCK) & (positions < self._warm_ends[:, None])
        self.far = far_mask(self.lengths, total, window)

    def logits(self, layer: int, q: Tensor) -> Tensor:
        """Scaled q [R, G, P, D] with every context token as it reads: [R, G, P, T]."""
        found = self.layers[layer]
        full, coded = _scores(q, found.k), _scores(q, found.coded_k)
        return torch.where(self._is_coded[:, None, None], coded, full)

    def scan(self, layer: int, q: Tensor) -> Tensor:
        """What the index thinks of the coded tokens, [R, G, N], -inf where a row's are not yet."""
        warm = self.layers[layer].warm
        if warm is None:
            return q.new_zeros(len(q), q.shape[1], 0)
        scores = share_scores(scan_codes(q, warm), "max")
        late = torch.arange(BLOCK, BLOCK + scores.shape[-1]) >= self._warm_ends[:, None]
        return scores.masked_fill(late[:, None], -torch.inf)

    def chosen(self, logits: Tensor, scan: Tensor, config: HybridConfig) -> Tensor:
        """Far tokens that are read: bool [R, G, P, T]."""
        seen = torch.zeros(len(logits), logits.shape[1], logits.shape[-1], dtype=torch.bool)
        if config.index == "none":
            return seen[:, :, None].expand(logits.shape)
        places = top_positions(scan, config.candidates)
        seen[..., BLOCK : BLOCK + scan.shape[-1]].scatter_(-1, places, True)
        seen |= ~self._is_coded[:, None]
        seen &= self.far[:, None]
        return choose(logits.masked_fill(~seen[:, :, None], -torch.inf), config)

    def read(self, config: HybridConfig | None) -> Tensor:
        """Hidden rows [R, H] of all questions; None: full attention over what is not coded."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(layer, q, k, v, config)

        return self._run(attend)

    def queries(self) -> tuple[list[Tensor], list[Tensor]]:
        """Scaled queries [R, G, P, D] and new keys [R, G, D] of each layer in full attention."""
        found: list[Tensor] = []
        keys: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.append(_scaled(q, k.shape[1]))
            keys.append(k)
            return self._attend(layer, q, k, v, None)

        self._run(attend)
        return found, keys

    def weights(self, layer: int, q: Tensor, own: Tensor) -> Tensor:
        """Full attention's, of context tokens: scaled q [R, G, P, D], new keys [R, G, D] ->
        [R, G, P, T]."""
        logits = _scores(q, self.layers[layer].k)
        mine = _scores(q, own.transpose(0, 1)).masked_fill(~self._own[:, None, None], -torch.inf)
        return torch.cat([logits, mine], -1).softmax(-1)[..., : logits.shape[-1]]

    @torch.no_grad()
    def _run(self, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        absorbed = self._model.config.is_mla
        hidden, _ = self._model(self.ids, self.lengths - 1, attend, absorbed=absorbed)
        return hidden

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, config: HybridConfig | None
    ) -> Tensor:
        found = self.layers[layer]
        scaled = _scaled(q, k.shape[1])
        own = _scores(scaled, k.transpose(0, 1))
        own = own.masked_fill(~self._own[:, None, None], -torch.inf)
        if config is None:
            logits = _scores(scaled, found.k)
        else:
            logits = self.logits(layer, scaled)
            read = self.chosen(logits, self.scan(layer, scaled), config)
            read = read | ~self.far[:, None, None]
            logits = logits.masked_fill(~read, -torch.inf)
        weights = torch.cat([logits, own], -1).softmax(-1)
        mine, old = weights[..., logits.shape[-1] :], weights[..., : logits.shape[-1]]
        out = _sums(mine, v.transpose(0, 1))
        if config is None:
            out = out + _sums(old, found.v)
        else:
            coded = self._is_coded[:, None, None]
            out = out + _sums(old * coded, found.coded_v) + _sums(old * ~coded, found.v)
        return out.flatten(1, 2)


@torch.no_grad()
def score_needles(
    model: PolicyModel, probe: Probe, questions: Sequence[Question], config: HybridConfig | None
) -> Needles:
    """As engine.bench.kv_reading.score_needles; ``probe`` holds the questions without their last
    tokens, in this order."""
    hidden = probe.read(config)
    nlls: list[float] = []
    right: list[int] = []
    end = 0
    for question in questions:
        end += len(question.ids) - 1
        logprobs = model.logits(hidden[end - DIGITS : end]).double().log_softmax(-1)
        label = torch.tensor(question.ids[-DIGITS:])
        nlls.append(-float(logprobs.gather(1, label[:, None]).mean()))
        right.append(int((logprobs.argmax(-1) == label).sum()))
    return Needles(
        nll=sum(nlls) / len(nlls),
        accuracy=sum(right) / (DIGITS * len(right)),
        numbers=sum(r == DIGITS for r in right),
        by_question=tuple(zip((q.position for q in questions), nlls, right, strict=True)),
    )


def _scaled(q: Tensor, groups: int) -> Tensor:
    """[R, A, D] -> [R, G, P, D]"""
    return (q.float() * q.shape[-1] ** -0.5).unflatten(1, (groups, -1))


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q [R, G, P, D], k [G, n, D] -> [R, G, P, n]"""
    flat = q.transpose(0, 1).flatten(1, 2)
    scores = torch.matmul(flat, k.transpose(1, 2))
    return scores.unflatten(1, (len(q), -1)).transpose(0, 1)


def _sums(weights: Tensor, v: Tensor) -> Tensor:
    """weights [R, G, P, n], v [G, n, V] -> [R, G, P, V]"""
    flat = weights.transpose(0, 1).flatten(1, 2)
    return torch.matmul(flat, v).unflatten(1, (len(weights), -1)).transpose(0, 1)
