"""Codes that an engine made, read by a learner in the place of its own.

An engine codes a block once, from keys and values that a learner computes only up to rounding, so a
few of the learner's codes come out one step beside. One step of a code is a thousand times the
rounding: only the engine's own codes give its log-probabilities back.

Shapes: B sequences, W recorded blocks (numbers 1 .. W, after the sink), J blocks that the learner
codes (W <= J), G key-value heads, D key size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import AttentionError
from engine.kvcache.layout import CacheLayout
from engine.kvcache.payload import layer_codes
from engine.kvcache.quantise import (
    BLOCK,
    Profile,
    WarmKeys,
    WarmValues,
    dequantise_keys,
    dequantise_values,
    key_codes,
    quantise_keys,
    quantise_values,
    read_as,
    value_codes,
)


@dataclass(frozen=True, slots=True)
class RecordedCodes:
    """payload uint8 [B, W, layout.warm_block_bytes], see payload.py; counts int64 [B]: blocks that
    were recorded of each sequence, the rest of W is padding."""

    payload: Tensor
    counts: Tensor
    layout: CacheLayout

    def __post_init__(self) -> None:
        size = self.layout.warm_block_bytes
        if self.payload.shape[2] != size:
            raise AttentionError(
                f"recorded codes take {self.payload.shape[2]} bytes a block, those of this model "
                f"{size} (profile {self.layout.profile!r}); engine and learner have different "
                "model sections"
            )

    def layer(self, layer: int) -> CodesOfLayer:
        keys, values = layer_codes(self.payload.flatten(0, 1), self.layout, layer)
        known = torch.arange(self.payload.shape[1]) < self.counts[:, None]
        return CodesOfLayer(keys, values, known)


@dataclass(frozen=True, slots=True)
class CodesOfLayer:
    """keys, values [B W, G, ...], see quantise.py; known bool [B, W]."""

    keys: WarmKeys
    values: WarmValues | None
    known: Tensor

    def check(self, lengths: Tensor, hot: int) -> None:
        """lengths int64 [B]. AttentionError when a sequence cannot have so many warm blocks."""
        own = (torch.div(lengths - hot, BLOCK, rounding_mode="floor") - 1).clamp(min=0)
        given = self.known.sum(dim=1)
        for row in (given > own).nonzero()[:1, 0].tolist():
            raise AttentionError(
                f"codes of {int(given[row])} blocks were recorded of a sequence of "
                f"{int(lengths[row])} tokens, of which {int(own[row])} turn warm with hot = {hot}; "
                "they are of other tokens or another hot zone"
            )

    def of_row(self, row: int) -> CodesOfLayer:
        """One sequence, without its padding."""
        width = self.known.shape[1]
        here = slice(row * width, row * width + int(self.known[row].sum()))
        keys = WarmKeys(*(x[here] for x in _of_keys(self.keys)))
        values = self.values
        if values is not None:
            values = WarmValues(*(x[here] for x in _of_values(values)))
        return CodesOfLayer(keys, values, self.known[row : row + 1, : here.stop - here.start])


@dataclass(slots=True)
class CodeFlips:
    """Stored numbers (codes, scales and minima) that were recorded, and how many of them the
    learner would have set differently."""

    flips: int = 0
    recorded: int = 0

    def count(self, own: Tensor, recorded: Tensor) -> None:
        self.flips += int((own != recorded).sum())
        self.recorded += own.numel()


def code_keys(
    k: Tensor, profile: Profile, recorded: CodesOfLayer | None, flips: CodeFlips | None = None
) -> tuple[Tensor, WarmKeys]:
    """k [B J, G, 32, D] -> what it reads as, with k's gradient, and its codes: those recorded where
    there are some, else its own."""
    codes = quantise_keys(k, profile)
    if recorded is not None:
        here = _places(recorded, len(k))
        theirs = WarmKeys(*(x[recorded.known.flatten()] for x in _of_keys(recorded.keys)))
        if flips is not None:
            mine = WarmKeys(*(x[here] for x in _of_keys(codes)))
            flips.count(key_codes(mine), key_codes(theirs))
            scales = slice(0, 1 if profile == "literal" else None)
            flips.count(mine.minimum[..., scales], theirs.minimum[..., scales])
            flips.count(mine.scale[..., scales], theirs.scale[..., scales])
        codes = WarmKeys(*_replaced(_of_keys(codes), _of_keys(theirs), here))
    return read_as(k, dequantise_keys(codes)), codes


def code_values(
    v: Tensor, profile: Profile, recorded: CodesOfLayer | None, flips: CodeFlips | None = None
) -> Tensor:
    """v [B J, G, 32, V] as it reads, see ``code_keys``."""
    codes = quantise_values(v, profile)
    if recorded is not None:
        if recorded.values is None:
            raise AttentionError("recorded codes are of latent attention, this one has values")
        here = _places(recorded, len(v))
        theirs = WarmValues(*(x[recorded.known.flatten()] for x in _of_values(recorded.values)))
        if flips is not None:
            mine = WarmValues(*(x[here] for x in _of_values(codes)))
            flips.count(value_codes(mine), value_codes(theirs))
            scales = slice(0, 1 if profile == "literal" else None)
            flips.count(mine.scale[:, :, scales], theirs.scale[:, :, scales])
            if mine.minimum is not None and theirs.minimum is not None:
                flips.count(mine.minimum, theirs.minimum)
        codes = WarmValues(*_replaced(_of_values(codes), _of_values(theirs), here))
    return read_as(v, dequantise_values(codes))


def _places(recorded: CodesOfLayer, num_blocks: int) -> Tensor:
    """Recorded blocks among the learner's: bool [B J]."""
    batch, width = recorded.known.shape
    own = num_blocks // batch
    assert width <= own, f"codes of {width} blocks for {own}, see CodesOfLayer.check"
    return torch.nn.functional.pad(recorded.known, (0, own - width)).flatten()


def _replaced(own: list[Tensor], theirs: list[Tensor], here: Tensor) -> list[Tensor]:
    mixed = []
    for mine, other in zip(own, theirs, strict=True):
        copy = mine.clone(memory_format=torch.contiguous_format)
        copy[here] = other
        mixed.append(copy)
    return mixed


def _of_keys(keys: WarmKeys) -> list[Tensor]:
    return [keys.top, keys.mid, keys.low, keys.minimum, keys.scale]


def _of_values(values: WarmValues) -> list[Tensor]:
    found = [values.codes, values.scale]
    return found if values.minimum is None else [*found, values.minimum]
