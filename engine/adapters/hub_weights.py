"""A weight set under the names that other engines' models use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.errors import WeightsError
from engine.model.checkpoint.names import pieces
from engine.runtime.types import WeightSet
from engine.runtime.weights import verify_weight_set


def hub_tensors(weights: WeightSet) -> Iterator[tuple[str, np.ndarray]]:
    """The set's tensors by hub name, as views of its arrays."""
    for name, tensor in weights.tensors.items():
        for piece in pieces(name, tensor.shape):
            yield piece.name, tensor[piece.index] if piece.index else tensor


def check_shapes(weights: WeightSet, shapes: dict[str, tuple[int, ...]]) -> None:
    """WeightsError unless the set is intact, finite, and has exactly ``shapes`` by hub name."""
    verify_weight_set(weights)
    version = weights.manifest.version
    given = {}
    for name, array in hub_tensors(weights):
        if array.dtype != np.float32:
            raise WeightsError(f"weight set {version}: {name} is {array.dtype}, expected float32")
        if not np.isfinite(array).all():
            raise WeightsError(
                f"weight set {version}: {name} holds NaN or infinity; the learner diverged: resume "
                "from an older checkpoint"
            )
        given[name] = array.shape
    missing, extra = sorted(set(shapes) - set(given)), sorted(set(given) - set(shapes))
    if missing or extra:
        raise WeightsError(
            f"weight set {version} does not fit this model: missing {missing[:3]}, unknown "
            f"{extra[:3]}; check the model section"
        )
    for name, shape in shapes.items():
        if given[name] != tuple(shape):
            raise WeightsError(
                f"weight set {version}: {name} has shape {given[name]}, this model expects "
                f"{tuple(shape)}; check the model section"
            )


def check_set(model: nn.Module, weights: WeightSet) -> None:
    """WeightsError unless ``set_tensors`` would do."""
    own = {name: tuple(tensor.shape) for name, tensor in _by_hub_name(model).items()}
    check_shapes(weights, own)
    config: Any = getattr(getattr(model, "policy", None), "config", None)
    if config is None:
        return
    # equal shapes may hide another model
    mine = config.model_dump(mode="json")
    for name, value in weights.manifest.model_config.items():
        if name not in mine or mine[name] != value:
            raise WeightsError(
                f"weight set {weights.manifest.version} was made with model.{name}={value}, this "
                f"engine has {mine.get(name)}; start both with the same model section"
            )


@torch.no_grad()
def set_tensors(model: nn.Module, weights: WeightSet) -> None:
    """Copy a set that ``check_set`` has passed into the model."""
    own = _by_hub_name(model)
    for name, array in hub_tensors(weights):
        own[name].copy_(torch.from_numpy(np.array(array)))


def _by_hub_name(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors as views; a tied head is the embedding's."""
    from engine.model.auto import PolicyForCausalLM

    if isinstance(model, PolicyForCausalLM):
        return {
            piece.name: tensor[piece.index] if piece.index else tensor
            for name, tensor in model.policy.state_dict().items()
            for piece in pieces(name, tuple(tensor.shape))
        }
    tensors = dict(model.state_dict())
    config: Any = model.config
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors
