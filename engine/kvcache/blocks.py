"""Paged block pool: physical KV blocks with reference counts. Pure bookkeeping, no tensors."""

from __future__ import annotations

from engine.errors import CapacityError


class BlockPool:
    """Hands out block numbers 1 .. num_blocks; block 0 is never owned (padding of block tables)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._refs = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; CapacityError takes none."""
        if count > len(self._free):
            raise CapacityError(
                f"{count} KV blocks wanted, {len(self._free)} of {self.num_blocks} free; release "
                "contexts or raise engine.num_blocks"
            )
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference to each block."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free and cannot be shared"
            self._refs[block] += 1

    def free(self, blocks: list[int]) -> int:
        """Drop one reference to each; returns how many became free."""
        freed = 0
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is freed twice"
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)
                freed += 1
        return freed

    def references(self, block: int) -> int:
        return self._refs[block]
