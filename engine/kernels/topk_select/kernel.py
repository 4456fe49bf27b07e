"""The k highest scores of each row, in rounds: every tile keeps its best, until one tile is left.

Score and position travel as one 64-bit number: the score's bits in an order that integers share,
then the position, inverted so that the lower one is the larger number. Comparing these numbers
breaks ties by position and makes the result independent of how tiles are cut.
"""

# tl.max is typed as if it might return a pair
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import SETTINGS, launch, padded


@triton.jit
def pack(score, position):
    """int64; what is -inf or NaN becomes the smallest number of all."""
    score = score + 0.0  # -0 and 0 are equal scores
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    hidden = (score == float("-inf")) | (score != score)
    packed = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - position).to(tl.int64)
    return tl.where(hidden, -0x7FFFFFFFFFFFFFFF, packed)


@triton.jit
def keep_best(numbers, out, KEEP: tl.constexpr):
    """A row that sees nothing far, as in dense contexts, is not sorted."""
    best = tl.full([KEEP], -0x7FFFFFFFFFFFFFFF, tl.int64)
    if tl.max(numbers, axis=0) > -0x7FFFFFFFFFFFFFFF:
        best = tl.topk(numbers, KEEP)
    tl.store(out + tl.arange(0, KEEP), best)


@triton.jit
def first_round_kernel(scores, out, width, num_tiles, TILE: tl.constexpr, KEEP: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    row, tile = pid // num_tiles, (pid % num_tiles).to(tl.int32)
    position = tile * TILE + tl.arange(0, TILE)
    score = tl.load(scores + row * width + position, mask=position < width, other=float("-inf"))
    keep_best(pack(score.to(tl.float32), position), out + pid * KEEP, KEEP)


@triton.jit
def next_round_kernel(packed, out, width, num_tiles, TILE: tl.constexpr, KEEP: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    row, tile = pid // num_tiles, (pid % num_tiles).to(tl.int32)
    place = tile * TILE + tl.arange(0, TILE)
    number = tl.load(packed + row * width + place, mask=place < width, other=-0x7FFFFFFFFFFFFFFF)
    keep_best(number, out + pid * KEEP, KEEP)


def topk_select_triton(scores: Tensor, k: int) -> Tensor:
    """See ``topk_select``."""
    shape, width = scores.shape[:-1], scores.shape[-1]
    rows = scores.numel() // width if width else 0
    if not rows:
        return torch.full((*shape, k), -1, dtype=torch.int64, device=scores.device)
    keep = padded(k)
    # a round must shrink what is left: a tile holds at least twice what it keeps
    tile = max(min(SETTINGS["topk_select"].sizes["TILE"], padded(width)), 2 * keep)
    kernel, numbers = first_round_kernel, scores.contiguous()
    while True:
        num_tiles = -(-width // tile)
        out = torch.empty(rows, num_tiles * keep, dtype=torch.int64, device=scores.device)
        launch(
            "topk_select",
            kernel,
            (rows * num_tiles,),
            numbers,
            out,
            width,
            num_tiles,
            TILE=tile,
            KEEP=keep,
        )
        if num_tiles == 1:
            break
        kernel, numbers, width = next_round_kernel, out, num_tiles * keep
    best = out[:, :k]
    chosen = torch.where(best == -0x7FFFFFFFFFFFFFFF, -1, 0x7FFFFFFF - (best & 0x7FFFFFFF))
    return chosen.view(*shape, k)
