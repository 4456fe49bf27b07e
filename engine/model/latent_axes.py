"""Turn the latents of a model to their principal axes, once; the model computes the same.

Latent attention leaves the latent's basis open: its norm does not see a rotation U as long as the
norm's own weights are first moved into kv_b_proj, so kv_a_proj gives U^T c, kv_b_proj takes it, and
every query, score and output stays what it was but for rounding. With U from the covariance of real
latents the first channels tell most, which is what index "latent" scans
(facts/kv-attention.md 2.2: "PCA-rotate the latent once per layer").

Shapes: N tokens, R latent rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import AttentionError
from engine.model.attention import LatentAttention
from engine.model.model import Layer, PolicyModel


def principal_axes(latents: Tensor) -> Tensor:
    """latents [N, R] -> orthogonal fp32 [R, R]: columns by falling variance. AttentionError for
    fewer tokens than channels."""
    count, rank = latents.shape
    if count <= rank:
        raise AttentionError(
            f"{count} tokens for a latent of {rank} channels; give more than that, some thousands "
            "of real text"
        )
    centred = latents.double() - latents.double().mean(dim=0)
    return torch.linalg.eigh(centred.T @ centred)[1].flip(1).float()


@torch.no_grad()
def turn_latents(model: PolicyModel, latents: Sequence[Tensor]) -> None:
    """latents: for each layer [N, R], as they are cached. In place. AttentionError for another
    model."""
    layers = [layer.self_attn for layer in model.layers if isinstance(layer, Layer)]
    if not model.config.is_mla or len(latents) != len(layers):
        raise AttentionError(
            f"latents of {len(latents)} layers for a model with {len(layers)} layers of "
            f"attention.kind={model.config.attention.kind!r}; expected one each, and 'mla'"
        )
    for attention, rows in zip(layers, latents, strict=True):
        assert isinstance(attention, LatentAttention), "mla"
        weight = attention.kv_a_layernorm.weight
        if not bool((weight > 0).all()):
            raise AttentionError(
                "a weight of kv_a_layernorm is not positive; such a model cannot be turned"
            )
        # the axes are of what the norm gives without its weights: those go elsewhere
        axes = principal_axes(rows / weight)
        rank, down = attention.rank, attention.kv_a_proj_with_mqa
        down[:rank] = (axes.T.double() @ down[:rank].double()).float()
        up = attention.kv_b_proj.double() * weight.double()
        attention.kv_b_proj.copy_((up @ axes.double()).float())
        weight.fill_(1.0)
