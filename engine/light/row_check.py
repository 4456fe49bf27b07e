"""Does this machine's arithmetic keep a row's bits in any batch? Asked once, when an engine starts.

Tiles fix the shapes that BLAS sees, not what BLAS does with them: another library or CPU, or more
threads, may still tie a row's rounding to its place. Then a deterministic engine must not start.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.errors import NotSupportedError
from engine.kvcache.paged import AttentionPlan, PagedKV
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.ops import RowOps


@torch.inference_mode()
def check_row_bits(model: PolicyModel, ops: RowOps, block_size: int, max_rows: int) -> None:
    """NotSupportedError when a row computed alone differs from itself inside larger batches."""
    generator = torch.Generator().manual_seed(0)
    num_rows = max_rows - max_rows % ops.row_multiple
    length = 2 * block_size
    kv = _filled_cache(model.config, block_size, generator)
    ids = torch.randint(model.config.vocab_size, (num_rows,), generator=generator)
    positions = torch.randint(
        min(length, model.config.max_position_embeddings), (num_rows,), generator=generator
    )
    head = torch.randn(model.config.vocab_size, model.config.hidden_size, generator=generator)

    def compute(rows: Tensor) -> Tensor:
        where = positions[rows]
        # AttentionPlan wants the longest first
        order = (where // block_size).argsort(descending=True, stable=True)
        rows, where = rows[order], where[order]
        tables = np.tile(np.array([[1, 2]]), (len(rows), 1))
        plan = AttentionPlan.of(tables, where.numpy(), block_size)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            return kv.attend(layer, q, plan) + own

        hidden, _ = model(ids[rows], where, attend, ops=ops, absorbed=True)
        result = torch.cat([hidden, ops.linear(hidden, head)], dim=1)
        return result[order.argsort()]

    everywhere = compute(torch.arange(num_rows))
    tile = ops.row_multiple
    for first in {0, num_rows // 2, num_rows - tile}:
        shuffled = torch.randperm(num_rows, generator=generator)[:tile]
        shuffled[0] = first
        alone = compute(shuffled)
        if not torch.equal(alone, everywhere[shuffled]):
            difference = float((alone - everywhere[shuffled]).abs().max())
            raise NotSupportedError(
                f"row bits depend on the batch here (difference {difference:.1e} with "
                f"{torch.get_num_threads()} threads, {num_rows} rows): engine.deterministic=true "
                "needs another BLAS or one thread (OMP_NUM_THREADS=1); or set it to false"
            )


def _filled_cache(config: ModelConfig, block_size: int, generator: torch.Generator) -> PagedKV:
    kv = PagedKV(
        config.num_hidden_layers,
        2,
        block_size,
        config.cached_heads,
        config.cached_key_dim,
        config.cached_value_dim,
    )
    for tensor in kv.keys + kv.values:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return kv
