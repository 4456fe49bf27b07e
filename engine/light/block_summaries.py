"""BlockSummaries: what stands for each context's coded blocks, warm or cold, layer by layer.

A block's mean key and value are taken when it turns to codes, from the codes, and kept for as long
as its context lives: 4 (D + V) bytes a layer, key-value head and block. So a block that went to the
cold tier is still summarised. Forks share what they have at that time.

Shapes: G key-value heads, D key size, V value size, J blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.summary import Summaries, block_means
from engine.attention.summary_adapters import MeanAdapters
from engine.attention.view import WarmBlocks
from engine.kvcache.step import Step
from engine.kvcache.tiered import TieredKV
from engine.model.config import ModelConfig
from engine.model.summaries import adapters_of

_Layers = dict[int, tuple[Tensor, Tensor]]
"""Mean key [G, D] and value [G, V] by layer."""


class BlockSummaries:
    def __init__(self, adapters: MeanAdapters | None) -> None:
        """None: plain means."""
        self._adapters = adapters
        self._means: dict[str, dict[int, _Layers]] = {}
        self._made: dict[tuple[str, int], tuple[int, Summaries]] = {}
        """By context and layer: of the first blocks up to a number, until others are learned."""

    @classmethod
    def of(cls, config: ModelConfig) -> BlockSummaries | None:
        """None where summaries are off. AttentionError when the adapters do not fit."""
        if config.attention.hybrid.summary_weight == 0:
            return None
        return cls(adapters_of(config))

    def learn(self, layer: int, kv: TieredKV, step: Step) -> None:
        """Blocks that the step codes, once ``kv.write`` has coded the layer."""
        moves = step.coding.moves
        if not moves:
            return
        pool = kv.device.warm
        slots = torch.tensor([warm for _, _, _, warm in moves])
        values = pool.values[layer] if pool.values else None
        # numbers of no context: only the slots matter here
        coded = WarmBlocks(pool.keys[layer], values, torch.arange(len(moves)), slots)
        means = block_means(coded, kv.layout.value_dim)
        for i, (view, block, _, _) in enumerate(moves):
            name = view.context.id
            layers = self._means.setdefault(name, {})
            # a fork may hold the old one
            layers[block] = layers.get(block, {}) | {
                layer: (means.keys[:, i].clone(), means.values[:, i].clone())
            }
            self._made.pop((name, layer), None)

    def summaries(self, ctx: str, layer: int, end: int) -> Summaries | None:
        """Of all blocks after the sink and before number ``end``; None when there are none."""
        made = self._made.get((ctx, layer))
        if made is not None and made[0] == end:
            return made[1]
        known = self._means.get(ctx, {})
        blocks = sorted(b for b in known if b < end)
        if not blocks:
            return None
        found = self._summarise(layer, blocks, [known[b][layer] for b in blocks])
        self._made[ctx, layer] = (end, found)
        return found

    def fork(self, parent: str, child: str) -> None:
        self._means[child] = {b: dict(layers) for b, layers in self._means.get(parent, {}).items()}

    def forget(self, ctx: str) -> None:
        self._means.pop(ctx, None)
        for key in [key for key in self._made if key[0] == ctx]:
            del self._made[key]

    def _summarise(
        self, layer: int, blocks: Sequence[int], means: Sequence[tuple[Tensor, Tensor]]
    ) -> Summaries:
        keys, values = (torch.stack(parts, dim=1) for parts in zip(*means, strict=True))
        plain = Summaries(keys, values, torch.tensor(blocks))
        return plain if self._adapters is None else self._adapters.summarise(layer, plain)
