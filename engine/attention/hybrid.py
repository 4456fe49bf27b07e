"""Hybrid attention of one decode step: sink, window, and retrieved far tokens.

Shapes: A query heads, G key-value heads, P = A / G, D key size, V value size. ``attend_hybrid``
takes the native path where it is allowed, built and knows the case, else the torch reference here.
Contexts of at most ``dense_below`` tokens are read whole, warm tokens still from their codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import native
from engine.attention.config import HybridConfig
from engine.attention.index import KeyCodeIndex
from engine.attention.merge import Part, merge, softmax_part
from engine.attention.retrieve import Retrieved, retrieve
from engine.attention.summary import Summaries, block_means, check_summarise, summary_part
from engine.attention.topology import is_dense, window_start
from engine.attention.view import LayerView
from engine.errors import AttentionError


@dataclass(frozen=True, slots=True)
class Attended:
    """out fp32 [A, V]; lse fp32 [A], log of the softmax's denominator; selected int32 [G, P, K]
    ([G, 1, K] when shared), rising positions filled up with -1, None when the context is dense."""

    out: Tensor
    lse: Tensor
    selected: Tensor | None


@torch.no_grad()
def attend_hybrid(
    q: Tensor,
    view: LayerView,
    config: HybridConfig,
    index: KeyCodeIndex | None = None,
    scale: float | None = None,
    summaries: Summaries | None = None,
) -> Attended:
    """q [A, D], the newest token's query, whose key is already in ``view``; scores are q.k * scale
    (default 1/sqrt(D)). ``index`` belongs to the context and layer; None makes one for this call.
    ``summaries``: of warm and cold blocks; None where config.summaries is "mean": means of the warm
    ones. AttentionError when the view lacks the window, or summaries are wanted and not given."""
    scaled = q.float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if not is_dense(view.length, config.dense_below):
        check_window(view, config)
    if config.native != "off" and summaries is None:
        done = native.decode(scaled, view, config)
        if done is not None:
            return Attended(*done)
    if config.native == "require":
        reason = native.why_not(view, config) or "it is not given summaries"
        raise AttentionError(f"attention.native = 'require', but {reason}")
    return attend_reference(scaled, view, config, index, summaries)


def attend_reference(
    scaled: Tensor,
    view: LayerView,
    config: HybridConfig,
    index: KeyCodeIndex | None = None,
    summaries: Summaries | None = None,
) -> Attended:
    """In torch; scaled fp32 [A, D]."""
    groups, value_dim = view.sink_k.shape[0], view.sink_v.shape[-1]
    q = scaled.unflatten(0, (groups, -1))[None]
    parts = [_full(q, view.sink_k, view.sink_v)]
    if is_dense(view.length, config.dense_below):
        if view.warm is not None and len(view.warm):
            warm_v = view.warm.dequantised_values(value_dim)
            parts.append(_full(q, view.warm.dequantised_keys(), warm_v))
        parts.append(_full(q, view.hot_k, view.hot_v))
        return _finish(parts, None)
    begin = window_start(view.length, config.window) - view.hot_start
    parts.append(_full(q, view.hot_k[:, begin:], view.hot_v[:, begin:]))
    lengths = torch.tensor([view.length])
    if index is None:
        latent = value_dim if view.warm is not None and view.warm.values is None else None
        index = KeyCodeIndex(config.index, latent, config.latent_dims)
    found = retrieve(q, lengths, view.warm, view.hot_k, view.hot_start, config, index)
    parts.extend(_retrieved(found, view))
    if config.summary_weight > 0:
        check_summarise(config, summaries)
        if summaries is None and view.warm is not None:
            summaries = block_means(view.warm, value_dim)
        warm_blocks = torch.empty(0, dtype=torch.int64) if view.warm is None else view.warm.blocks
        if summaries is not None and len(summaries.blocks):
            weight = config.summary_weight
            parts.append(summary_part(q, summaries, found, warm_blocks, weight))
    return _finish(parts, found.selected(config)[0])


def check_window(view: LayerView, config: HybridConfig) -> None:
    begin = window_start(view.length, config.window)
    if view.hot_start > begin:
        raise AttentionError(
            f"the window of a context of {view.length} tokens begins at {begin}, but "
            f"full-precision tokens only at {view.hot_start}; keep at least {config.window} tokens "
            "hot"
        )


def _full(q: Tensor, k: Tensor, v: Tensor) -> Part:
    """Everything of k [G, N, D], v [G, N, V]: the group's heads are rows of one product."""
    logits = torch.matmul(q, k.float().transpose(1, 2))
    return softmax_part(logits, v.float())


def _retrieved(found: Retrieved, view: LayerView) -> list[Part]:
    """Of warm tokens and of hot ones: two parts, as values would be copied to lie side by side."""
    logits = found.logits.masked_fill(~found.chosen, -torch.inf)
    num_warm = found.tokens.shape[-1]
    # padding comes last and is never chosen
    hot_v = view.hot_v[:, : found.num_hot].float()
    parts = [softmax_part(logits[..., num_warm : num_warm + hot_v.shape[1]], hot_v[None])]
    if num_warm:
        assert view.warm is not None, "candidates are warm tokens"
        values = view.warm.value_rows(found.tokens, view.sink_v.shape[-1])
        parts.append(softmax_part(logits[..., :num_warm], values))
    return parts


def _finish(parts: list[Part], selected: Tensor | None) -> Attended:
    out, lse = merge(parts)
    return Attended(out[0].flatten(0, 1), lse[0].flatten(), selected)
