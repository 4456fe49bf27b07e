"""KeyCodeIndex: which warm tokens are worth reading, by approximate scores of all of them.

Shapes: R query rows, G key-value heads, P query heads per key-value head, D key size, W blocks,
M candidates. Queries come already scaled. What an index keeps beside the warm blocks themselves:
codes, latent, quest: nothing. int8: 8-bit rows and a step (D + 4 bytes a token and head). mean: a
mean key a block. bf16: nothing, it dequantises all keys at every scan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.codes import scan_codes
from engine.attention.config import HybridConfig, IndexKind
from engine.attention.latent import latent_scores
from engine.attention.scores import exact_scores
from engine.attention.select import (
    STRIDE,
    TWO_STAGES,
    peaks,
    share_scores,
    top_by_peaks,
    top_positions,
)
from engine.attention.view import WarmBlocks
from engine.errors import AttentionError
from engine.kvcache.quantise import BLOCK, dequantise_keys

_PIECE = 32768
"""Tokens of the int8 copy that are scored at a time."""
_FEW_ROWS = 8
"""Query rows and heads up to which one product each is the quicker way."""


class KeyCodeIndex:
    """Scores a context's warm keys in one layer. Calls mutate it (int8 and mean learn new blocks),
    so one belongs to one context and layer."""

    def __init__(self, kind: IndexKind, latent: int | None = None, dims: int = 64) -> None:
        """``latent``, ``dims``: for index latent, channels of the latent, None where a model has
        none, and how many of them are scored."""
        self.kind: IndexKind = kind
        self._latent, self._dims = latent, dims
        self._copy: _Int8Copy | None = None
        self._means = torch.empty(0)
        self._blocks = torch.empty(0, dtype=torch.int64)

    @property
    def scores_blocks(self) -> bool:
        """Whether a score stands for a block instead of a token."""
        return self.kind in ("quest", "mean")

    def scores(self, q: Tensor, warm: WarmBlocks) -> Tensor:
        """q fp32 [R, G, P, D] -> fp32 [R, G, P, 32 W], or [R, G, P, W] when it scores blocks."""
        if self.kind == "codes":
            return scan_codes(q, warm)
        if self.kind == "bf16":
            return exact_scores(q, warm.dequantised_keys())
        if self.kind == "latent":
            return latent_scores(q, warm, self._latent, self._dims)
        if self.kind == "quest":
            return _bounds(q, warm)
        if self.kind == "none":
            raise AttentionError("index 'none' scores nothing; ask it for no candidates")
        self._learn(warm)
        if self.kind == "int8":
            assert self._copy is not None, "learned above"
            return self._copy.scores(q)
        return exact_scores(q, self._means[: len(warm)].transpose(0, 1))

    def candidates(self, q: Tensor, warm: WarmBlocks, config: HybridConfig) -> Tensor:
        """The best warm tokens for each group's heads together: int64 [R, G, M], rising places
        32 * (place of the block in ``warm``) + offset. Ties go to the lower position."""
        return self.shortlist(q, warm, config)[0]

    def shortlist(
        self, q: Tensor, warm: WarmBlocks, config: HybridConfig
    ) -> tuple[Tensor, Tensor | None]:
        """``candidates``, and log of the sum of the exponentials of all tokens' scores fp32
        [R, G, P]: heads that share a choice weigh a candidate by its part of everything, not of
        the candidates. None where all are candidates, where shares are the largest score, or where
        blocks are scored."""
        rows, groups = q.shape[:2]
        if self.kind == "none" or not len(warm):
            return torch.empty(rows, groups, 0, dtype=torch.int64), None
        if self.kind == "int8" and config.topk_unit == "token" and config.share == "max":
            self._learn(warm)
            assert self._copy is not None, "learned above"
            places = self._copy.best(q, config.candidates)
            if places is not None:
                return places, None
        by_head = self.scores(q, warm)
        scores = share_scores(by_head, config.share)
        if config.topk_unit == "token" and not self.scores_blocks:
            total = None
            if config.share == "softmax" and by_head.shape[-1] > config.candidates:
                total = by_head.double().logsumexp(dim=-1).float()
            return top_positions(scores, config.candidates), total
        if not self.scores_blocks:
            scores = scores.unflatten(-1, (-1, BLOCK)).amax(dim=-1)
        wanted = -(-config.candidates // BLOCK)
        if config.topk_unit == "block":
            wanted = max(wanted, config.topk)
        places = top_positions(scores, wanted)
        return (places[..., None] * BLOCK + torch.arange(BLOCK)).flatten(-2), None

    def _learn(self, warm: WarmBlocks) -> None:
        """Take in blocks that joined the end of ``warm``; start anew when others did."""
        known = len(self._blocks)
        if not torch.equal(warm.blocks[:known], self._blocks):
            self._copy, self._means, known = None, torch.empty(0), 0
        self._blocks = warm.blocks.clone()
        if known == len(warm):
            return
        keys = dequantise_keys(warm.gathered_keys(known))
        if self.kind == "mean":
            means = keys.mean(dim=2)
            self._means = torch.cat([self._means, means]) if known else means
            return
        if self._copy is None:
            self._copy = _Int8Copy(centre=keys[0].mean(dim=1))
        self._copy.extend(keys.transpose(0, 1).flatten(1, 2))


def _bounds(q: Tensor, warm: WarmBlocks) -> Tensor:
    """Largest score a block's keys could have by their minimum and maximum a channel (Quest)."""
    keys = warm.gathered_keys()
    width = (255 * keys.scale.float()).transpose(0, 1)
    low = exact_scores(q, keys.minimum.float().transpose(0, 1))
    return low + exact_scores(q.clamp(min=0), width)


@dataclass(slots=True)
class _Int8Copy:
    """Keys around a fixed centre, in 8 bits with a step per token and head: one integer matrix
    product scores them. The centre is the mean of the context's first warm block, so that the
    copy is a pure function of the keys. Buffers grow by half."""

    centre: Tensor
    codes: Tensor = torch.empty(0, dtype=torch.int8)  # noqa: RUF009 - empty, replaced not written
    steps: Tensor = torch.empty(0)  # noqa: RUF009
    size: int = 0

    def extend(self, keys: Tensor) -> None:
        """keys [G, N, D]"""
        offset = keys - self.centre[:, None]
        steps = (offset.abs().amax(dim=-1) / 127).clamp(min=1e-20)
        codes = torch.round(offset / steps[..., None]).to(torch.int8)
        end = self.size + keys.shape[1]
        if self.codes.numel() == 0 or end > self.codes.shape[1]:
            room = max(end, self.size * 3 // 2)
            old_codes, old_steps = self.codes, self.steps
            self.codes = torch.zeros(len(keys), room, keys.shape[2], dtype=torch.int8)
            self.steps = torch.zeros(len(keys), room)
            if self.size:
                self.codes[:, : self.size] = old_codes[:, : self.size]
                self.steps[:, : self.size] = old_steps[:, : self.size]
        self.codes[:, self.size : end] = codes
        self.steps[:, self.size : end] = steps
        self.size = end

    def scores(self, q: Tensor) -> Tensor:
        """q fp32 [R, G, P, D] -> fp32 [R, G, P, N]"""
        query = _Query.of(q, self.centre)
        scores = query.finish(self._products(query))
        return scores.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)

    def best(self, q: Tensor, count: int) -> Tensor | None:
        """Places of the ``count`` largest of a group's heads' largest scores, int64 [R, G, count],
        rising; None when equals compete for the last place, or there is little to choose from.

        The same numbers as ``scores``, without most of them: what follows the product with a
        token's step rises with it, so it is done to peaks and to what is near them only.
        """
        if self.size < TWO_STAGES * count:
            return None
        query, heads = _Query.of(q, self.centre), q.shape[2]
        tops = torch.empty(*query.codes.shape[:2], self.size // STRIDE)
        products = self._products(query, tops)

        def shared(part: Tensor) -> Tensor:
            return query.finish(part).unflatten(1, (-1, heads)).amax(dim=2)

        def scores_at(places: Tensor) -> Tensor:
            return shared(products.gather(2, places.repeat_interleave(heads, dim=1)))

        places = top_by_peaks(shared(tops), scores_at, count)
        return None if places is None else places.sort(dim=-1).values.transpose(0, 1).contiguous()

    def _products(self, query: _Query, tops: Tensor | None = None) -> Tensor:
        """Integer products times the token's step, fp32 [G, R P, N]; their peaks in ``tops``."""
        groups, rows = query.codes.shape[:2]
        # the library copies keys for more than one row at a time; a piece read from memory once and
        # from the cache for every further row takes four fifths of the time
        parts = rows if rows <= _FEW_ROWS else 1
        sums = torch.empty(rows * min(self.size, _PIECE), dtype=torch.int32)
        products = torch.empty(groups, rows, self.size)
        for group, into in enumerate(products):
            queries = query.codes[group].chunk(parts)
            for begin in range(0, self.size, _PIECE):
                piece = slice(begin, min(self.size, begin + _PIECE))
                keys = self.codes[group, piece].T
                whole = sums[: rows * keys.shape[1]].view(rows, -1)
                for codes, out in zip(queries, whole.chunk(parts), strict=True):
                    torch._int_mm(codes, keys, out=out)  # pyright: ignore[reportPrivateImportUsage]
                into[:, piece].copy_(whole).mul_(self.steps[group, piece])
            if tops is not None:
                tops[group] = peaks(into)
        return products


@dataclass(frozen=True, slots=True)
class _Query:
    """Rows and heads in 8 bits: codes int8 [G, R P, D]; steps fp32 [G, R P, 1]; first fp32
    [G, R P, 1], what the centre scores."""

    codes: Tensor
    steps: Tensor
    first: Tensor

    @classmethod
    def of(cls, q: Tensor, centre: Tensor) -> _Query:
        flat = q.transpose(0, 1).flatten(1, 2)
        steps = (flat.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-20)
        codes = torch.round(flat / steps).to(torch.int8)
        first = (flat.double() @ centre.double()[..., None]).float()
        return cls(codes, steps, first)

    def finish(self, products: Tensor) -> Tensor:
        """Scores of products [G, R P, C]."""
        return (products * self.steps).add_(self.first)
