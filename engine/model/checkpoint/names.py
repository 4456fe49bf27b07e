"""Our tensors under the names of the released K2 checkpoints (facts 8.1).

In memory gate and up are one matrix and a layer's experts one stack, which is what is fast; on the
hub each expert has three matrices of its own. So one of our tensors is one or more hub tensors,
each with its place in ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.model.config import ModelConfig

PREFIX = "language_model."
"""K2.5 and Kimi-VL put it before every text tensor; readers drop it."""
_SKIPPED = re.compile(
    r"(vision_tower|mm_projector|model\.mm_projector|model\.vision_tower)\..*"
    r"|.*\.rotary_emb\.inv_freq"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")


@dataclass(frozen=True, slots=True)
class Piece:
    """``ours[index]`` is the hub tensor ``name`` of this shape."""

    name: str
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]


def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Hub tensors that make up a tensor of PolicyModel's state_dict."""
    if name == "lm_head":
        return [Piece("lm_head.weight", (), shape)]
    stem = f"model.{name}"
    if name.endswith(".experts_gate_up_proj"):
        experts, rows, hidden = shape
        prefix = stem.removesuffix("_gate_up_proj")
        return [
            Piece(f"{prefix}.{expert}.{half}_proj.weight", (expert, place), (rows // 2, hidden))
            for expert in range(experts)
            for half, place in _halves(rows)
        ]
    if name.endswith(".experts_down_proj"):
        prefix = stem.removesuffix("_down_proj")
        return [
            Piece(f"{prefix}.{expert}.down_proj.weight", (expert,), shape[1:])
            for expert in range(shape[0])
        ]
    if name.endswith(".gate_up_proj"):
        prefix = stem.removesuffix("gate_up_proj")
        return [
            Piece(f"{prefix}{half}_proj.weight", (place,), (shape[0] // 2, shape[1]))
            for half, place in _halves(shape[0])
        ]
    own = name.endswith((".weight", ".e_score_correction_bias"))
    return [Piece(stem if own else f"{stem}.weight", (), shape)]


def _halves(rows: int) -> tuple[tuple[str, slice], tuple[str, slice]]:
    return ("gate", slice(0, rows // 2)), ("up", slice(rows // 2, rows))


def hub_shapes(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes by our names -> shapes by hub names, in the order of ours."""
    return {
        piece.name: piece.shape for name, shape in tensors.items() for piece in pieces(name, shape)
    }


def is_skipped(name: str, config: ModelConfig) -> bool:
    """A hub tensor that the text policy does not read: vision, tables, multi-token prediction, and
    the second copy of a tied head."""
    if _SKIPPED.fullmatch(name) or (name == "lm_head.weight" and config.tie_word_embeddings):
        return True
    layer = _LAYER.fullmatch(name)
    extra = range(
        config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers
    )
    return layer is not None and int(layer[1]) in extra
