"""From an index's candidates to what each head reads, scored exactly.

Shapes: R query rows, G key-value heads, P query heads per key-value head, D key size, M candidates,
C scored tokens (candidates, then the hot tokens before the window, then padding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.index import KeyCodeIndex
from engine.attention.scores import exact_scores
from engine.attention.select import choose, listed
from engine.attention.view import WarmBlocks
from engine.kvcache.quantise import BLOCK


@dataclass(frozen=True, slots=True)
class Retrieved:
    """tokens int64 [R, G, M]: warm candidates as places in the view; positions int64 [R, G, C];
    logits fp32 [R, G, P, C], -inf where there is nothing; chosen bool [R, G, P, C]; num_hot: how
    many of the C are hot tokens or padding."""

    tokens: Tensor
    positions: Tensor
    logits: Tensor
    chosen: Tensor
    num_hot: int

    def selected(self, config: HybridConfig) -> Tensor:
        """The choice as positions: int32 [R, G, P, K], or [R, G, 1, K] when it is shared; -1 fills.
        K is topk, or 32 topk for blocks."""
        chosen = self.chosen[:, :, :1] if config.topk_shared else self.chosen
        return listed(chosen, self.positions, selection_width(config))


def selection_width(config: HybridConfig) -> int:
    return config.topk * (BLOCK if config.topk_unit == "block" else 1)


@torch.no_grad()
def retrieve(
    q: Tensor,
    lengths: Tensor,
    warm: WarmBlocks | None,
    hot_k: Tensor,
    hot_start: int,
    config: HybridConfig,
    index: KeyCodeIndex,
) -> Retrieved:
    """q fp32 [R, G, P, D], already scaled; lengths int64 [R], context length of each row; hot_k
    [G, H, D] from position hot_start on, where all rows' warm tokens end."""
    rows, groups = q.shape[:2]
    num_far = max(0, int(lengths.max()) - config.window - hot_start)
    if config.index == "none":
        num_far, warm = 0, None
    total = None
    if warm is None or not len(warm):
        tokens = torch.empty(rows, groups, 0, dtype=torch.int64)
        logits = q.new_empty(*q.shape[:3], 0)
        positions = tokens
    else:
        tokens, total = index.shortlist(q, warm, config)
        keys = warm.key_rows(tokens).double()
        logits = torch.matmul(q.double(), keys.transpose(2, 3)).float()
        positions = warm.blocks[tokens // BLOCK] * BLOCK + tokens % BLOCK
    padding = -num_far % BLOCK
    hot_positions = torch.arange(hot_start, hot_start + num_far + padding)
    hot_logits = exact_scores(q, hot_k[:, :num_far])
    hidden = hot_positions[:num_far] >= (lengths - config.window)[:, None]
    hot_logits = hot_logits.masked_fill(hidden[:, None, None], -torch.inf)
    hot_logits = F.pad(hot_logits, (0, padding), value=-torch.inf)
    if total is not None:
        hot_total = hot_logits.double().logsumexp(dim=-1) if num_far else -torch.inf
        total = torch.logaddexp(total.double(), torch.as_tensor(hot_total).double()).float()
    logits = torch.cat([logits, hot_logits], dim=-1)
    positions = torch.cat([positions, hot_positions.expand(rows, groups, -1)], dim=-1)
    return Retrieved(tokens, positions, logits, choose(logits, config, total), num_far + padding)
