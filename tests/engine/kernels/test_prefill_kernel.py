"""Many queries a context see what decode steps at their positions would see."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.dispatch import Implementation
from engine.kernels.prefill_hybrid import Visibility, pack_positions, prefill_hybrid
from engine.kvcache.quantise import BLOCK, fake_quantise
from tests.engine.kernels.interpreter import Kernels
from tests.engine.kernels.parity import assert_as_good, numbers

NAME = "engine.kernels.prefill_hybrid:prefill_hybrid"
HEADS, GROUPS, KEY, VALUE = 4, 2, 12, 8


def coded(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks of [N, L, G, D] after coding and decoding; the rest stays."""
    out_k, out_v = k.clone(), v.clone()
    for block in range(k.shape[1] // BLOCK):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        both = fake_quantise(k[:, part].transpose(1, 2), v[:, part].transpose(1, 2), "k8v4")
        out_k[:, part], out_v[:, part] = (x.transpose(1, 2) for x in both)
    return out_k, out_v


def exact_prefill(arguments: tuple[Any, ...], chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Position by position in fp64, from the rules and not from masks."""
    q, k, v, warm_k, warm_v, _, firsts, counts, see, scale = arguments
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    for n in range(len(q)):
        for i in range(int(counts[n])):
            t = int(firsts[n]) + i + 1
            for a in range(q.shape[2]):
                group = a // (q.shape[2] // k.shape[2])
                far: set[int] = set()
                if chosen is not None:
                    row = chosen[n, i, a // (q.shape[2] // chosen.shape[2])]
                    far = set(row.tolist()) - {-1}
                seen = [
                    p
                    for p in range(t)
                    if p < BLOCK or p >= t - see.window or t <= see.dense_below or p in far
                ]
                warm = [p // BLOCK >= 1 and BLOCK * (p // BLOCK + 1) <= t - see.hot for p in seen]
                pick = torch.tensor(warm)[:, None]
                keys = torch.where(pick, warm_k[n, seen, group], k[n, seen, group]).double()
                values = torch.where(pick, warm_v[n, seen, group], v[n, seen, group]).double()
                logits = scale * (keys @ q[n, i, a].double())
                lse[n, i, a] = logits.logsumexp(0)
                out[n, i, a] = (logits - lse[n, i, a]).exp() @ values
    return out, lse


def inputs(
    firsts: list[int], counts: list[int], queries: int, see: Visibility, lists: int
) -> tuple[tuple[Any, ...], Tensor | None]:
    length = max(f + c for f, c in zip(firsts, counts, strict=True))
    contexts = len(firsts)
    q = numbers(contexts, queries, HEADS, KEY)
    k = numbers(contexts, length, GROUPS, KEY, seed=1)
    v = numbers(contexts, length, GROUPS, VALUE, seed=2)
    chosen = None
    if lists:
        limits = torch.tensor(firsts)[:, None] + torch.arange(queries) - see.window
        draws = torch.rand(contexts, queries, lists, 5, generator=torch.Generator().manual_seed(3))
        chosen = (draws * limits[:, :, None, None]).long()
        chosen = chosen.where((chosen >= BLOCK) & (limits[:, :, None, None] > BLOCK), -1)
    bits = None if chosen is None else pack_positions(chosen, length)
    sizes = (torch.tensor(firsts), torch.tensor(counts), see, 0.4)
    return (q, k, v, *coded(k, v), bits, *sizes), chosen


@pytest.mark.slow
@pytest.mark.parametrize("lists", [0, GROUPS, HEADS])
def test_every_position_sees_what_decoding_would(kernels: Kernels, lists: int):
    """Two contexts, one padded; queries that straddle the edge of the dense zone and of blocks."""
    see = Visibility(window=24, hot=40, dense_below=70)
    arguments, chosen = inputs([60, 5], [41, 20], 41, see, lists)
    ours = kernels.run(NAME, *arguments)
    torchs = prefill_hybrid(*arguments)
    for a, b, c in zip(ours, torchs, exact_prefill(arguments, chosen), strict=True):
        assert_as_good(a, b, c)


@pytest.mark.slow
def test_no_queries_and_one(kernels: Kernels):
    see = Visibility(window=8, hot=32)
    arguments, chosen = inputs([0], [1], 1, see, 0)
    ours = kernels.run(NAME, *arguments)
    for a, c in zip(ours, exact_prefill(arguments, chosen), strict=True):
        assert_as_good(a, a, c)
    nothing = (arguments[0][:, :0], *arguments[1:])
    assert kernels.run(NAME, *nothing)[0].shape == (1, 0, HEADS, VALUE)


def test_chunks_do_not_change_the_twin():
    """A prompt in one piece equals the same prompt in chunks, bit for bit where shapes allow it."""
    see = Visibility(window=24, hot=40)
    arguments, _ = inputs([0], [150], 150, see, GROUPS)
    whole = prefill_hybrid(*arguments)
    q, bits = arguments[0], arguments[5]
    assert bits is not None
    parts: list[tuple[Tensor, Tensor]] = []
    for a, b in ((0, 50), (50, 150)):
        sizes = (torch.tensor([a]), torch.tensor([b - a]), *arguments[8:])
        chunk: list[Any] = [q[:, a:b], *arguments[1:5], bits[:, a:b], *sizes]
        parts.append(prefill_hybrid(*chunk))
    for i in range(2):
        joined = torch.cat([part[i] for part in parts], dim=1)
        assert torch.allclose(joined, whole[i], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_the_twins(kernels: Kernels):
    """Through both readings of keys and values; what was not asked for has none."""
    see = Visibility(window=8, hot=8, dense_below=100)
    arguments, _ = inputs([0], [75], 75, see, 0)
    ours = kernels.run("tests.engine.kernels.test_prefill_kernel:gradients", *arguments)
    torchs = gradients(*arguments)
    for a, b in zip(ours, torchs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5) and b.abs().max() > 0


def gradients(*arguments: Any, implementation: Implementation = "auto") -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in arguments[:5]]
    out, lse = prefill_hybrid(*leaves, *arguments[5:], implementation=implementation)
    (out.square().sum() + lse[:, 1:].sum()).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]
