"""Muon's work over ranks: the step of one, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from parl.learner.optim.muon import Muon, orthogonalise
from parl.learner.optim.peers import Peers, owners, work_of

SHAPES = [(16, 16), (24, 8), (4, 32, 16), (4, 16, 16), (1, 5)]
HALVES = 2


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def steps(optimizer: Muon, values: list[nn.Parameter]) -> list[Tensor]:
    """Three: whole, one stack partly at rest, one stack wholly at rest and one without gradient."""
    generator = torch.Generator().manual_seed(8)
    for step in range(3):
        for value in values:
            value.grad = torch.randn(value.shape, generator=generator)
        if step == 1:
            optimizer.slices[id(values[HALVES])] = torch.tensor([1.0, -1.0, 0.5, 1.0])
        if step == 2:
            optimizer.slices[id(values[HALVES])] = torch.full((4,), -1.0)
            values[0].grad = None
        optimizer.step()
    return [value.detach() for value in values]


def make(values: list[nn.Parameter], peers: Peers | None, dtype: torch.dtype) -> Muon:
    halves = [values[HALVES]]
    return Muon(values, 0.02, 0.95, 0.1, halves, ns_dtype=dtype, peers=peers)


class Room:
    """Threads that meet: each leaves its tensor and takes those of all."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=120)
        self._slots: list[Tensor] = [torch.empty(0)] * count
        self.calls = [0] * count

    def gather_for(self, rank: int):
        def gather(tensor: Tensor) -> Sequence[Tensor]:
            self.calls[rank] += 1
            self._slots[rank] = tensor
            self._barrier.wait()
            found = [slot.clone() for slot in self._slots]
            self._barrier.wait()
            return found

        return gather


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 9])
def test_ranks_that_share_take_the_step_of_one(count: int, dtype: torch.dtype):
    """Nine ranks have more hands than matrices; halves and resting slices as alone; one collective
    call a step on every rank."""
    values = parameters()
    alone = steps(make(values, None, dtype), values)
    room = Room(count)
    found: list[list[Tensor]] = [[] for _ in range(count)]

    def work(rank: int) -> None:
        own = parameters()
        found[rank] = steps(make(own, Peers(rank, count, room.gather_for(rank)), dtype), own)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert room.calls == [3] * count
    for mine in found:
        assert all(torch.equal(a, b) for a, b in zip(alone, mine, strict=True))


def test_work_goes_to_the_rank_with_the_least():
    """The largest piece first; with more ranks than pieces some get none."""
    assert owners([1, 8, 4, 4, 1], 2) == [0, 0, 1, 1, 1]
    assert owners([5, 5], 4) == [0, 1]
    assert owners([], 3) == []
    assert work_of((3, 8, 4)) == 3 * 4 * 4 * 8 == work_of((3, 4, 8))


def test_full_precision_is_nearer_to_itself_in_double():
    """float32 Newton-Schulz follows the float64 one to rounding, bf16 to a few percent."""
    update = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(2))
    exact = orthogonalise(update.double(), torch.float64)
    for dtype, low, high in ((torch.float32, 0.0, 1e-4), (torch.bfloat16, 1e-3, 0.1)):
        error = float((orthogonalise(update, dtype) - exact).norm() / exact.norm())
        assert low <= error < high
