"""TieredKV against the dict oracle, in any order of step, evict, re-warm, fork and release."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kvcache.config import TierConfig
from engine.kvcache.quantise import BLOCK
from engine.kvcache.tiers import Tier
from tests.engine.kvcache.tiers_oracle import Model, check, make_cache, step

CONFIG = TierConfig(hot=40, warm=96, cold="host", debug_nan=True)


class TieredMachine(RuleBasedStateMachine):
    """Freed blocks are NaN, so a use after free differs from the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = make_cache(CONFIG, num_full=300, num_warm=400)
        self.models: dict[str, Model] = {}
        self.count = 2
        self.kv.open("c1")
        self.models["c1"] = Model(CONFIG)
        # a shared block that is not whole, and one that turns warm next
        step(self.kv, self.models, {"c1": (1, list(range(100)))})
        self.kv.fork("c1", "c2")
        self.models["c2"] = self.models["c1"].copy()

    def teardown(self) -> None:
        for ctx in list(self.models):
            self.kv.release(ctx)
        self.kv.settle()
        assert self.kv.used_bytes == 0 and len(self.kv.store) == 0, "something leaked"
        self.kv.close()

    def any_context(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.models)))

    @precondition(lambda self: len(self.models) < 5)
    @rule()
    def open(self) -> None:
        self.count += 1
        self.kv.open(f"c{self.count}")
        self.models[f"c{self.count}"] = Model(CONFIG)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), count=st.sampled_from([1, 3, 31, 32, 33, 70, 200]))
    def grow(self, data: st.DataObject, count: int) -> None:
        """One or two contexts in a batch; missing rows first."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.models)), min_size=1, max_size=2))
        batch: dict[str, tuple[int, list[int]]] = {}
        for ctx in dict.fromkeys(chosen):
            model = self.models[ctx]
            missing = [p for p, seed in enumerate(model.seeds) if seed is None]
            start = len(model.seeds)
            todo = (missing + list(range(start, start + count)))[:count]
            self.count += 1
            batch[ctx] = (self.count, todo)
            again = {p // BLOCK for p in todo if p < start}
            model.cold -= again
            model.kept |= {b for b in again if self.was_cold(model, b)}
        step(self.kv, self.models, batch)

    @staticmethod
    def was_cold(model: Model, block: int) -> bool:
        end = (len(model.seeds) - CONFIG.hot) // BLOCK - CONFIG.warm // BLOCK
        return 1 <= block < end

    @precondition(lambda self: self.models)
    @rule(data=st.data(), cold=st.booleans())
    def evict(self, data: st.DataObject, cold: bool) -> None:
        ctx = self.any_context(data)
        model = self.models[ctx]
        length = len(model.seeds)
        start = data.draw(st.integers(0, length))
        end = data.draw(st.integers(start, min(length, start + 100)))
        wanted = range(start // BLOCK, -(-end // BLOCK)) if end > start else range(0)
        result = self.kv.evict(ctx, start, end, "cold" if cold else "absent")
        gone = [a // BLOCK for a, _ in result.evicted]
        assert all(b == min(a + BLOCK, length) for a, b in result.evicted), "a block was cut"
        if not cold:
            assert gone == [b for b in wanted if model.tier(b) != Tier.ABSENT]
            for block in gone:
                last = min((block + 1) * BLOCK, length)
                model.seeds[block * BLOCK : last] = [None] * (last - block * BLOCK)
                model.cold.discard(block)
                model.kept.discard(block)
            return
        whole = [b for b in wanted if b and None not in model.seeds[b * BLOCK : (b + 1) * BLOCK]]
        whole = [b for b in whole if (b + 1) * BLOCK <= length]
        assert gone == [b for b in whole if model.tier(b) != Tier.COLD]
        model.cold |= set(gone)
        model.kept -= set(gone)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def rewarm(self, data: st.DataObject) -> None:
        ctx = self.any_context(data)
        model = self.models[ctx]
        start = data.draw(st.integers(0, len(model.seeds)))
        end = data.draw(st.integers(start, min(len(model.seeds), start + 150)))
        result = self.kv.rewarm(ctx, start, end)
        wanted = range(start // BLOCK, -(-end // BLOCK)) if end > start else range(0)
        now = {b for b in wanted if model.tier(b) in (Tier.WARM, Tier.COLD)}
        assert set(result.loaded) == now and not result.pending and not result.lost
        model.cold -= now
        model.kept |= now

    @precondition(lambda self: self.models and len(self.models) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.any_context(data)
        self.count += 1
        self.kv.fork(parent, f"c{self.count}")
        self.models[f"c{self.count}"] = self.models[parent].copy()

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ctx = self.any_context(data)
        self.kv.release(ctx)
        del self.models[ctx]

    @invariant()
    def the_cache_is_the_oracle(self) -> None:
        for ctx, model in self.models.items():
            check(self.kv, ctx, model)


class LongMachine(TieredMachine):
    """The same for longer."""


TieredMachine.TestCase.settings = settings(max_examples=8, stateful_step_count=12)
LongMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25)
TestTieredMachine: Callable[..., object] = TieredMachine.TestCase
TestLongMachine: Callable[..., object] = pytest.mark.slow(LongMachine.TestCase)
