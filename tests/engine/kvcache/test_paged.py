"""Attention over blocks against a plain softmax over the whole context."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kvcache.paged import AttentionPlan, PagedKV


def filled(block_size: int, num_blocks: int) -> PagedKV:
    kv = PagedKV(1, num_blocks, block_size, groups=2, head_dim=6)
    generator = torch.Generator().manual_seed(0)
    for tensor in (kv.keys[0], kv.values[0]):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return kv


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_blocks_give_the_softmax_over_all_positions(block_size: int):
    """Rows of 32 lengths from 1 on, blocks scattered through the pool."""
    rng = np.random.default_rng(0)
    positions = np.sort(rng.integers(0, 3 * block_size, 32))[::-1].copy()
    num_blocks = 32 * 3
    kv = filled(block_size, num_blocks)
    tables = (rng.permutation(num_blocks) + 1).reshape(32, 3)
    q = torch.randn(32, 4, 6, generator=torch.Generator().manual_seed(1))
    out = kv.attend(0, q, AttentionPlan.of(tables, positions, block_size))
    for row, position in enumerate(positions):
        keys = torch.cat([kv.keys[0][b].permute(2, 0, 1) for b in tables[row]])[: position + 1]
        values = torch.cat([kv.values[0][b].permute(1, 0, 2) for b in tables[row]])[: position + 1]
        for head in range(4):
            scores = keys[:, head // 2] @ q[row, head] * 6**-0.5
            expected = scores.softmax(0) @ values[:, head // 2]
            torch.testing.assert_close(out[row, head], expected, rtol=1e-5, atol=1e-6)


def test_what_is_written_is_read_back():
    """write puts a row's key and value where the plan finds them; a copy is independent."""
    kv = PagedKV(1, 3, 4, groups=2, head_dim=6)
    k, v = torch.randn(1, 2, 6), torch.randn(1, 2, 6)
    kv.write(0, kv.slots(torch.tensor([2]), torch.tensor([3])), k, v)
    kv.copy_block(2, 3)
    kv.clear_block(2)
    torch.testing.assert_close(kv.keys[0][3, :, :, 3], k[0])
    torch.testing.assert_close(kv.values[0][3, :, 3], v[0])
    assert not kv.keys[0][2].any() and not kv.values[0][2].any()


def test_the_byte_account_is_what_is_stored():
    """bytes_per_block = what one block takes in all layers."""
    kv = PagedKV(3, 5, 8, groups=2, head_dim=6)
    stored = sum(t[0].numel() * t.element_size() for t in kv.keys + kv.values)
    assert kv.bytes_per_block == stored
