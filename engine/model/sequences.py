"""Full-context forward for training: padded causal attention around the row model.

Shapes: B sequences, T longest length, N real tokens, A query heads, G key-value heads, D head size,
L layers with experts, M layers, S chosen tokens a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.batched import attend_batch
from engine.attention.recorded import CodeFlips, RecordedCodes
from engine.attention.score_cap import ScoreCap
from engine.model.model import PolicyModel, WatchRouter
from engine.model.summaries import adapters_of, summarise_with

Watch = Callable[[int, Tensor, Tensor], None]
"""(layer, q [B, A, T, D], k [B, G, T, D]), rotated, zero where padded."""
WatchChoice = Callable[[int, Tensor], None]
"""(layer, the far tokens that these queries choose: int32 [B, T, G, A / G | 1, S], -1 fills)."""


def forward_sequences(
    model: PolicyModel,
    token_ids: Tensor,
    lengths: Tensor,
    experts: Tensor | None = None,
    watch: Watch | None = None,
    *,
    absorbed: bool = False,
    watch_router: WatchRouter | None = None,
    selections: Tensor | None = None,
    watch_choice: WatchChoice | None = None,
    codes: RecordedCodes | None = None,
    code_flips: CodeFlips | None = None,
    cap: ScoreCap | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids int64 [B, T] right-padded, lengths int64 [B], experts int64 [B, T, L, K] or None.

    In mode hybrid every query reads what an engine's step at its position read: coded keys, sink,
    window and chosen tokens; ``selections`` int32 [B, T, M, G, A / G | 1, S] replays recorded
    choices, ``codes`` the engine's codes, and ``code_flips`` counts those that these weights would
    set differently. Latent attention is then absorbed, because codes are made of the latent.
    ``cap`` holds scores back before the softmax and counts them; while it is idle no bit differs.

    Returns (hidden [N, H], choices int64 [N, L, K], rows int64 [N] = index into B*T). Padding is
    never computed outside attention.
    """
    batch, longest = token_ids.shape
    real = torch.arange(longest, device=token_ids.device)[None] < lengths[:, None]
    rows = real.flatten().nonzero()[:, 0]
    positions = torch.arange(longest, device=token_ids.device).repeat(batch)[rows]

    config = model.config.attention
    hybrid = config.mode == "hybrid"
    adapters = adapters_of(model.config)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = rows.to(q.device)

        def padded(x: Tensor) -> Tensor:
            full = x.new_zeros(batch * longest, *x.shape[1:]).index_copy(0, places, x)
            return full.view(batch, longest, *x.shape[1:]).transpose(1, 2)

        repeat = q.shape[1] // k.shape[1]
        queries, keys = padded(q), padded(k)
        if watch is not None:
            watch(layer, queries, keys)
        if hybrid:
            values = None if model.config.is_mla else padded(v)
            recorded = None if selections is None else selections[:, :, layer]
            done = attend_batch(
                queries.transpose(1, 2),
                keys.transpose(1, 2),
                None if values is None else values.transpose(1, 2),
                lengths,
                config.hybrid,
                config.hot,
                config.profile,
                replay=recorded,
                with_choice=watch_choice is not None,
                recorded=None if codes is None else codes.layer(layer),
                flips=code_flips,
                value_dim=v.shape[2] if model.config.is_mla else None,
                summarise=summarise_with(adapters, layer),
                cap=cap,
            )
            if watch_choice is not None:
                assert done.selected is not None, "asked for"
                watch_choice(layer, done.selected)
            # latent rows carry their values in front
            return done.out.flatten(0, 1)[places][..., : v.shape[2]].to(q.dtype)
        keys = keys.repeat_interleave(repeat, dim=1)
        values = padded(v).repeat_interleave(repeat, dim=1)
        weights = None if cap is None else _capped_weights(queries, keys, real.to(q.device), cap)
        if weights is None:
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            out = weights @ values
        return out.transpose(1, 2).reshape(batch * longest, q.shape[1], v.shape[2])[places]

    replay = None if experts is None else experts.flatten(0, 1)[rows]
    hidden, choices = model(
        token_ids.flatten()[rows],
        positions,
        attend,
        experts=replay,
        absorbed=absorbed or hybrid,
        watch_router=watch_router,
    )
    return hidden, choices, rows


def _capped_weights(q: Tensor, k: Tensor, real: Tensor, cap: ScoreCap) -> Tensor | None:
    """Attention weights [B, A, T, T] of q, k [B, A, T, D] under ``cap``; None while it is idle, and
    the fused product serves. real bool [B, T]."""
    longest = q.shape[2]
    causal = torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    capped = cap.clamp(scores, causal & real[:, None, :, None])
    if capped is scores:
        return None
    return capped.masked_fill(~causal, -torch.inf).softmax(dim=-1).to(q.dtype)
