"""Which rank orthogonalises which matrix, and how the results come together.

Momentum is the same on all ranks (gradients were summed), so each rank does Newton-Schulz for its
share of the matrices and all get all of them. A matrix, or a stack of an expert tensor, is done
whole on one rank: its bits do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Peers:
    """This rank among those that share Muon's work."""

    rank: int
    count: int
    all_gather: Callable[[Tensor], Sequence[Tensor]]
    """A tensor [n], the same n on every rank -> those of all ranks, in their order."""


def work_of(shape: Sequence[int]) -> int:
    """Multiplications of a Newton-Schulz step [..., rows, cols], up to a factor: small^2 large."""
    *stack, rows, cols = shape
    matrices = 1
    for size in stack:
        matrices *= size
    return matrices * min(rows, cols) ** 2 * max(rows, cols)


def owners(work: Sequence[int], count: int) -> list[int]:
    """The rank of each piece of ``work``: the largest first, to the rank with the least so far."""
    loads, found = [0] * count, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        rank = loads.index(min(loads))
        found[index] = rank
        loads[rank] += work[index]
    return found
