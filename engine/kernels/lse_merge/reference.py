"""Merging attention over disjoint parts: the torch twin."""

from __future__ import annotations

from torch import Tensor

from engine.attention.merge import merge


def lse_merge_reference(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See ``lse_merge``."""
    return merge(list(zip(parts.float().unbind(), lses.float().unbind(), strict=True)))
