"""The same attention for many queries of one sequence: prefill chunks and the learner.

Shapes: T positions, n queries (the last n positions), A query heads, G key-value heads, P = A / G,
D key size, V value size. Every query sees what the decode step at its position saw: the same masks,
the same codes for tokens that were warm then, the same choice of far tokens (or a recorded one).
Gradients pass through the codes unchanged; none pass through the choice. A reference with full
rows of masked scores, so T * n * A numbers in pieces of 32 queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.index import KeyCodeIndex
from engine.attention.merge import merge, softmax_part
from engine.attention.recorded import CodeFlips, CodesOfLayer, code_keys, code_values
from engine.attention.retrieve import Retrieved, retrieve, selection_width
from engine.attention.score_cap import ScoreCap
from engine.attention.summary import Summarise, check_summarise, means_of, summary_part
from engine.attention.topology import Chunk, causal_mask, chunks, near_mask, warm_end, warm_start
from engine.attention.view import LayerView, WarmBlocks, dense_keys, dense_values
from engine.errors import AttentionError
from engine.kvcache.quantise import (
    BLOCK,
    Profile,
    WarmKeys,
    quantise_keys,
    quantise_values,
)


@dataclass(frozen=True, slots=True)
class SequenceAttended:
    """out [n, A, V]; lse [n, A]; selected int32 [n, G, P, K] ([n, G, 1, K] when shared), -1 fills
    and is all there is in rows of dense queries."""

    out: Tensor
    lse: Tensor
    selected: Tensor


def attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    config: HybridConfig,
    hot: int,
    profile: Profile = "k8v8",
    *,
    scale: float | None = None,
    value_dim: int | None = None,
    replay: Tensor | None = None,
    warm: int | None = None,
    recorded: CodesOfLayer | None = None,
    flips: CodeFlips | None = None,
    summarise: Summarise | None = None,
    cap: ScoreCap | None = None,
) -> SequenceAttended:
    """q [n, A, D], k [T, G, D], v [T, G, V] as the model made them, before any coding; v None:
    latent attention, values are the first ``value_dim`` channels of what keys read as. ``replay``:
    ``selected`` of another run, read instead of choosing. ``warm``: tokens the warm tier holds;
    older ones are cold and hidden, None hides none. ``recorded``: an engine's codes of one
    sequence, read in the place of these queries' own; ``flips`` counts how these differ.
    ``summarise``: the layer's trained summaries, needed when they are on. ``cap`` holds scores of
    tokens back, not those of summaries; the choice of tokens does not see it. AttentionError when
    what was recorded does not fit, or summaries are missing."""
    config.check_hot(hot)
    check_summarise(config, summarise)
    if recorded is not None:
        recorded.check(torch.tensor([len(k)]), hot)
    coding = _Coding(profile, recorded, flips)
    rows = _Rows(q, k, v, config, hot, coding, scale, value_dim, warm)
    rows.summarise = summarise if config.summaries == "adapters" else None
    rows.cap = cap
    num_choices = 1 if config.topk_shared else rows.q.shape[2]
    shape = (len(q), k.shape[1], num_choices, selection_width(config))
    if replay is not None and replay.shape != shape:
        raise AttentionError(
            f"recorded selections have shape {tuple(replay.shape)}, these queries need {shape}"
        )
    selected = torch.full(shape, -1, dtype=torch.int32)
    outs, lses = [], []
    for chunk in chunks(rows.start, len(k), hot if rows.coded else len(k), config.dense_below):
        here = slice(chunk.first - 1 - rows.start, chunk.last - rows.start)
        out, lse, chosen = rows.attend(chunk, None if replay is None else replay[here])
        outs.append(out)
        lses.append(lse)
        if chosen is not None:
            selected[here] = chosen
    return SequenceAttended(torch.cat(outs), torch.cat(lses), selected)


@dataclass(frozen=True, slots=True)
class _Coding:
    profile: Profile
    recorded: CodesOfLayer | None
    flips: CodeFlips | None


class _Rows:
    """Keys and values of a sequence as they are and as they read once warm."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        config: HybridConfig,
        hot: int,
        coding: _Coding,
        scale: float | None,
        value_dim: int | None,
        warm: int | None,
    ) -> None:
        self.config, self.warm = config, warm
        self.summarise: Summarise | None = None
        self.cap: ScoreCap | None = None
        self.start = len(k) - len(q)
        self.coded = coding.profile != "full"
        scaled = q.float() * (q.shape[-1] ** -0.5 if scale is None else scale)
        self.q = scaled.unflatten(1, (k.shape[1], -1))
        self.k = k.float().transpose(0, 1)
        self.value_dim = value_dim
        self.v = None if v is None else v.float().transpose(0, 1)
        end = warm_end(len(k), hot) if self.coded else BLOCK
        blocks = _blocks(self.k, end)
        how = (coding.profile, coding.recorded, coding.flips)
        self.codes: WarmKeys | None = None
        if len(blocks):
            blocks, self.codes = code_keys(blocks, *how)
        self.warm_k = _flat(blocks)
        self.warm_v: Tensor | None = None
        if self.v is not None:
            values = _blocks(self.v, end)
            self.warm_v = _flat(code_values(values, *how) if len(values) else values)

    def attend(self, chunk: Chunk, replay: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """out [r, A, V], lse [r, A], and the choice [r, G, P | 1, K] of sparse queries."""
        lengths = torch.arange(chunk.first, chunk.last + 1)
        q = self.q[chunk.first - 1 - self.start : chunk.last - self.start]
        k, v = self._mixed(chunk)
        num = chunk.last
        first_warm = warm_start(chunk.warm_end, self.warm)
        visible = causal_mask(lengths, num)
        visible[:, BLOCK:first_warm] = False
        causal = visible[:, None, None]
        found = None
        if chunk.dense:
            seen, selected = causal, None
        else:
            near = near_mask(lengths, num, self.config.window)[:, None, None]
            if replay is None:
                found = self._retrieve(q.detach(), lengths, chunk)
                selected = found.selected(self.config)
            else:
                selected = replay
            seen = (near | _mask_of(selected, num)) & causal
        logits = torch.einsum("rgpd,gnd->grpn", q, k)
        shown = seen.transpose(0, 1)
        if self.cap is not None:
            logits = self.cap.clamp(logits, shown)
        hidden = ~shown.expand(logits.shape)
        logits = logits.masked_fill(hidden, -torch.inf)
        out, lse = softmax_part(logits.flatten(1, 2), v)
        out = out.unflatten(1, q.shape[:1] + q.shape[2:3]).transpose(0, 1)
        lse = lse.unflatten(1, q.shape[:1] + q.shape[2:3]).transpose(0, 1)
        if self.config.summary_weight > 0 and not chunk.dense and chunk.warm_end > BLOCK:
            found = self._replayed(selected, chunk) if found is None else found
            blocks = torch.arange(1, chunk.warm_end // BLOCK)
            coded = slice(BLOCK, chunk.warm_end)
            made = means_of(k[:, coded], v[:, coded], blocks)
            made = made if self.summarise is None else self.summarise(made)
            warm_blocks = blocks[first_warm // BLOCK - 1 :]
            part = summary_part(q, made, found, warm_blocks, self.config.summary_weight)
            out, lse = merge([(out, lse), part])
        return out.flatten(1, 2), lse.flatten(1, 2), selected

    def _mixed(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Keys and values [G, chunk.last, ...] as this chunk's queries read them."""
        ends = slice(0, BLOCK), slice(0, chunk.warm_end - BLOCK), slice(chunk.warm_end, chunk.last)
        k = torch.cat([self.k[:, ends[0]], self.warm_k[:, ends[1]], self.k[:, ends[2]]], dim=1)
        k = k[:, : chunk.last]
        if self.v is None or self.warm_v is None:
            return k, k[..., : self.value_dim]
        v = torch.cat([self.v[:, ends[0]], self.warm_v[:, ends[1]], self.v[:, ends[2]]], dim=1)
        return k, v[:, : chunk.last]

    def _retrieve(self, q: Tensor, lengths: Tensor, chunk: Chunk) -> Retrieved:
        warm = self._warm(chunk)
        index = KeyCodeIndex(self.config.index, self.value_dim, self.config.latent_dims)
        hot_k = self.k[:, chunk.warm_end : chunk.last].detach()
        return retrieve(q, lengths, warm, hot_k, chunk.warm_end, self.config, index)

    def _warm(self, chunk: Chunk) -> WarmBlocks | None:
        first = warm_start(chunk.warm_end, self.warm)
        slots = torch.arange(first // BLOCK, chunk.warm_end // BLOCK) - 1
        if not len(slots) or self.codes is None:
            return None
        return WarmBlocks(self.codes, None, slots + 1, slots)

    def _replayed(self, selected: Tensor | None, chunk: Chunk) -> Retrieved:
        """Recorded warm tokens in the form that summaries count."""
        assert selected is not None, "sparse chunks have a choice"
        rows, groups, heads = len(selected), *self.q.shape[1:3]
        first = warm_start(chunk.warm_end, self.warm)
        num_warm = chunk.warm_end - first
        mask = _mask_of(selected, chunk.last)[..., first : chunk.warm_end]
        tokens = torch.arange(num_warm).expand(rows, groups, num_warm)
        chosen = mask.expand(rows, groups, heads, num_warm)
        return Retrieved(tokens, tokens + first, torch.zeros(chosen.shape), chosen, 0)


def _mask_of(selected: Tensor, num_positions: int) -> Tensor:
    """int32 [R, G, P | 1, K], -1 is none -> bool [R, G, P | 1, num_positions]."""
    if selected.numel() and int(selected.max()) >= num_positions:
        raise AttentionError(
            f"recorded selections name position {int(selected.max())}, which a query that sees "
            f"{num_positions} tokens cannot have read"
        )
    places = selected.long().masked_fill(selected < 0, num_positions)
    mask = torch.zeros(*selected.shape[:3], num_positions + 1, dtype=torch.bool)
    return mask.scatter_(-1, places, True)[..., :-1]


def _blocks(x: Tensor, end: int) -> Tensor:
    """x [G, T, D] -> [W, G, 32, D], positions 32 .. end - 1."""
    return (
        x[:, BLOCK:end].unflatten(1, (-1, BLOCK)).transpose(0, 1)
        if end > BLOCK
        else (x.new_empty(0, len(x), BLOCK, x.shape[2]))
    )


def _flat(blocks: Tensor) -> Tensor:
    """[W, G, 32, D] -> [G, 32 W, D]"""
    return blocks.transpose(0, 1).flatten(1, 2)


def view_of(
    k: Tensor,
    v: Tensor | None,
    hot: int,
    profile: Profile = "k8v8",
    value_dim: int | None = None,
) -> LayerView:
    """What a decode step finds after k [T, G, D], v [T, G, V] were cached, the last token included:
    blocks coded as the cache codes them. For tests, benches and rebuilding a context."""
    keys = k.float().transpose(0, 1)
    values = keys[..., :value_dim] if v is None else v.float().transpose(0, 1)
    end = warm_end(len(k), hot) if profile != "full" else BLOCK
    warm = None
    if end > BLOCK:
        slots = torch.arange(end // BLOCK - 1)
        coded = None
        if v is not None:
            coded = dense_values(quantise_values(_blocks(values, end), profile))
        codes = dense_keys(quantise_keys(_blocks(keys, end), profile))
        warm = WarmBlocks(codes, coded, slots + 1, slots)
    return LayerView(
        length=len(k),
        sink_k=keys[:, :BLOCK],
        sink_v=values[:, :BLOCK],
        hot_k=keys[:, end:],
        hot_v=values[:, end:],
        warm=warm,
    )
