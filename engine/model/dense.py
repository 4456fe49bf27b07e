"""Padded batches with a growing cache: for generation outside an engine, and as its oracle.

Shapes: B sequences, T new tokens, S tokens so far (T included), G cached heads, D key size, V value
size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import NotSupportedError
from engine.model.model import PolicyModel
from engine.model.ops import FastOps, RowOps, pad_rows

Extend = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new k [B, G, T, D], new v [B, G, T, V]) -> all k [B, G, S, D], v [B, G, S, V]."""


class DenseCache:
    """Keys and values of one batch. The same object serves plain or absorbed mla, not both."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self._layers:
            old_k, old_v = self._layers[layer]
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        self._layers[layer] = (k, v)
        return k, v


def forward_dense(
    model: PolicyModel,
    token_ids: Tensor,
    mask: Tensor,
    extend: Extend | None = None,
    *,
    positions: Tensor | None = None,
    absorbed: bool = False,
    ops: RowOps | None = None,
) -> tuple[Tensor, Tensor]:
    """token_ids int64 [B, T]; mask bool [B, S], false where padded on either side.

    Returns (hidden [B, T, H], choices int64 [B, T, L, K]); rows of padding hold finite numbers that
    mean nothing. Positions count the real tokens unless given as int64 [B, T]. With the ``ops`` of
    ``TiledOps`` a token's products have the same bits alone and in a prompt; attention's sums do
    not.
    """
    if model.config.attention.mode == "hybrid":
        raise NotSupportedError(
            "forward_dense reads every token, the model has attention.mode='hybrid'; use "
            "LightEngine or forward_sequences, or set the mode to full"
        )
    batch, new = token_ids.shape
    ops = ops or FastOps()
    rows, total = batch * new, mask.shape[1]
    if positions is None:
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, total - new :]
    query = torch.arange(total - new, total, device=mask.device)
    key = torch.arange(total, device=mask.device)
    seen = (key[None] <= query[:, None])[None] & mask[:, None]
    # a query with nothing to see would be NaN
    seen = (seen | (key[None] == query[:, None])[None])[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[:rows].unflatten(0, (batch, new)).transpose(1, 2) for x in (q, k, v))
        if extend is not None:
            k, v = extend(layer, k, v)
        repeat = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(repeat, dim=1),
            v.repeat_interleave(repeat, dim=1),
            attn_mask=seen.to(q.device),
        )
        return pad_rows(out.transpose(1, 2).flatten(0, 1), ops.row_multiple)

    padded = (pad_rows(x.flatten(), ops.row_multiple) for x in (token_ids, positions))
    hidden, choices = model(*padded, attend, absorbed=absorbed, ops=ops)
    return hidden[:rows].unflatten(0, (batch, new)), choices[:rows].unflatten(0, (batch, new))


@torch.no_grad()
def greedy(
    model: PolicyModel, prompt: list[int], max_new_tokens: int, stop_ids: frozenset[int]
) -> list[int]:
    """The most likely tokens after ``prompt``, one at a time through the cache; a stop token ends
    them and is the last one."""
    cache, fed, made = DenseCache(), torch.tensor([prompt]), []
    length = len(prompt)
    while len(made) < max_new_tokens:
        mask = torch.ones(1, length, dtype=torch.bool)
        hidden, _ = forward_dense(model, fed, mask, cache.extend, absorbed=True)
        made.append(int(model.logits(hidden[:, -1]).argmax()))
        if made[-1] in stop_ids:
            break
        fed, length = torch.tensor([[made[-1]]]), length + 1
    return made
