"""What a tiered cache can do when it runs full: shrink hot zones, send codes away. Not in
deterministic mode, where tiers depend on position and length alone."""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention.config import HybridConfig
from engine.kvcache.quantise import BLOCK
from engine.kvcache.tiered import TieredKV
from engine.light.context import Context
from engine.light.hot_watch import HotWatch


def shrink_hot(
    kv: TieredKV, contexts: Sequence[Context], hybrid: HybridConfig, watch: HotWatch | None
) -> int:
    """Every hot zone becomes a quarter shorter, at most down to the window; how many did. What
    lies outside is coded at once where no step runs, else by its next batch. Zones stay so until
    their contexts end."""
    if kv.config.deterministic or not kv.device.warm.keys:
        return 0
    least = max(BLOCK, -(-hybrid.window // BLOCK) * BLOCK)
    changed = 0
    for context in contexts:
        hot = kv.config_of(context.id).hot
        shorter = max(least, (hot - max(BLOCK, hot // 4)) // BLOCK * BLOCK)
        if shorter < hot:
            kv.set_hot(context.id, shorter)
            if watch is not None:
                watch.shrunk(context.id, shorter)
            changed += 1
        # blocks that are coded outside of a step leave no summary behind
        if context.is_idle and hybrid.summary_weight == 0:
            kv.code_old(context.id)
    return changed


def to_cold(kv: TieredKV, num_bytes: int) -> int:
    """Send the oldest warm blocks of the longest unused contexts away; bytes freed on the device,
    once they are written. 0 where there is no cold tier, or it is full."""
    if not kv.layout.warm_block_bytes:
        return 0
    before = kv.used_bytes
    left = num_bytes
    while left > 0 and kv.relieve(-(-left // kv.layout.warm_block_bytes), ""):
        kv.settle()
        freed = before - kv.used_bytes
        if num_bytes - freed >= left:
            break
        left = num_bytes - freed
    return max(0, before - kv.used_bytes)


def warm_up(kv: TieredKV, rounds: int) -> int:
    """See ContextTable.warm_up; codes are touched too."""
    full, warm = kv.device.full, kv.device.warm
    free, coded = full.slots.num_free, warm.slots.num_free
    for _ in range(rounds):
        slots = full.take(free)
        kv.device.drop_full(slots[::-1])
        if warm.keys:
            held = warm.take(coded)
            warm.touch(held)
            kv.device.drop_warm(held[::-1])
    return free
