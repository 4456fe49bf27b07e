"""Selection for latent attention by some channels of its keys (facts/kv-attention.md 2.2).

All heads share one key a token, the latent and a rotary part, and a scan of all its channels for
each of very many heads costs more than it saves. So a token is scored by the latent's first
``dims`` channels and all rotary ones, in 8 bits from the codes that are stored anyway; what the
other channels of its block could add is one number a block and head, by the middle of their range.
The candidates are then scored exactly and the heads choose together (retrieve, share = softmax).

Which channels come first is the model's doing: engine.model.latent_axes turns each layer's latent
to its principal axes once, so that the first ones tell most. Without that the first ones are any
ones; figures are in docs/claims.md.

Shapes: R query rows, G key-value heads (1), P query heads, D key size, V latent size, W blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.scores import exact_scores
from engine.attention.view import WarmBlocks
from engine.errors import AttentionError
from engine.kvcache.quantise import WarmKeys, dequantise_keys

MIDDLE = 127.5
"""Of a code's range 0 .. 255."""


def scored_channels(key_dim: int, latent: int, dims: int) -> Tensor:
    """int64, rising: the first ``dims`` of the latent's channels and all that come after them.
    AttentionError when there are not so many."""
    if dims > latent:
        raise AttentionError(
            f"latent_dims = {dims} of a latent with {latent} channels; expected at most those"
        )
    return torch.cat([torch.arange(dims), torch.arange(latent, key_dim)])


def latent_scores(q: Tensor, warm: WarmBlocks, latent: int | None, dims: int) -> Tensor:
    """q fp32 [R, G, P, D], already scaled; latent: channels of the key before its rotary ones ->
    fp32 [R, G, P, 32 W]. AttentionError when there is no latent."""
    if latent is None:
        raise AttentionError(
            "index 'latent' is for latent attention, whose values are part of its keys; use index "
            "'codes' for this model"
        )
    channels = scored_channels(q.shape[-1], latent, dims)
    keys = warm.gathered_keys()
    scores = exact_scores(q[..., channels], _picked(keys, channels))
    rest = torch.ones(q.shape[-1], dtype=torch.bool)
    rest[channels] = False
    if not bool(rest.any()):
        return scores
    middle = keys.minimum.float() + MIDDLE * keys.scale.float()
    blocks = exact_scores(q[..., rest], middle[..., rest].transpose(0, 1))
    return (scores.unflatten(-1, (len(warm), -1)) + blocks[..., None]).flatten(-2)


def _picked(keys: WarmKeys, channels: Tensor) -> Tensor:
    """fp32 [G, 32 W, C]: some channels, in whole groups of four as the planes hold them."""
    quads = channels.view(-1, 4)[:, 0] // 4
    pairs = channels.view(-1, 2)[:, 0] // 2
    some = WarmKeys(
        keys.top[:, :, quads],
        keys.mid[:, :, quads],
        keys.low[:, :, pairs],
        keys.minimum[..., channels],
        keys.scale[..., channels],
    )
    return dequantise_keys(some).transpose(0, 1).flatten(1, 2)
