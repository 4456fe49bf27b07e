"""Behaviours of TieredKV one by one; any order of them is test_tiered_machine.py."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import (
    BlockCorrupt,
    CapacityError,
    ContextLost,
    InvalidStateError,
    NotSupportedError,
)
from engine.kvcache.config import TierConfig
from engine.kvcache.layout import HEADER_BYTES, CacheLayout
from engine.kvcache.quantise import BLOCK, Profile, dequantise_keys, quantise_keys
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import State, Tier, tier_of
from tests.engine.kvcache.tiers_oracle import (
    DIM,
    HEADS,
    LAYERS,
    Model,
    check,
    make_cache,
    rows,
    step,
)
from tests.parl.rollout.infra import fill_up, small_disk

CONFIG = TierConfig(hot=32, warm=64, debug_nan=True)


def filled(kv: TieredKV, length: int, chunk: int = 48, ctx: str = "a") -> Model:
    """A context of ``length`` rows, written in chunks."""
    models = {ctx: Model(kv.config)}
    kv.open(ctx)
    for start in range(0, length, chunk):
        step(kv, models, {ctx: (1, list(range(start, min(length, start + chunk))))})
    return models[ctx]


@pytest.mark.parametrize("profile", ["k8v8", "k8v4", "literal", "full"])
@pytest.mark.parametrize("chunk", [1, 200])
def test_a_context_walks_through_the_tiers(profile: Profile, chunk: int):
    """Sink and hot in full precision, then codes, then cold; the same whatever the chunks."""
    kv = make_cache(TierConfig(hot=32, warm=64, profile=profile, debug_nan=True))
    model = filled(kv, 200, chunk)
    check(kv, "a", model)
    kv.settle()
    if profile != "full":
        states = [State.HOT, State.COLD_HOST, State.COLD_HOST, State.WARM, State.WARM]
        assert kv.states("a") == [*states, State.HOT, State.HOT]
        assert kv.host_bytes == 2 * kv.layout.record_bytes
    kv.close()


def test_a_query_of_a_chunk_sees_the_tiers_of_its_own_length():
    """Blocks that turn warm or cold in a chunk: each row's tiers are those of the pure rule."""
    kv = make_cache(CONFIG)
    filled(kv, 150)
    positions = list(range(150, 330))
    with kv.step([("a", positions)]) as running:
        for layer in range(LAYERS):
            kv.write(layer, running, *rows([1] * 180, positions, layer))
        view = running.views[0]
        for t in range(151, 331):
            tiers, slots = view.tiers(t)
            expected = [tier_of(b, t, CONFIG) for b in range(-(-t // BLOCK))]
            readable = [Tier.ABSENT if tier == Tier.COLD else tier for tier in expected]
            assert tiers.tolist() == readable
            assert ((slots > 0) == (tiers != Tier.ABSENT)).all()
    kv.close()


@pytest.mark.parametrize("cold", ["host", "disk"])
def test_spill_and_load_give_the_same_bits(cold: str, tmp_path: Path):
    """Codes, scales and minima of every layer, and again after a second round, which moves
    nothing."""
    config = {"hot": 32, "warm": 96, "cold": cold, "directory": tmp_path, "host_bytes": 0}
    if cold == "host":
        config |= {"host_bytes": 1 << 20}
    kv = make_cache(TierConfig.model_validate(config))
    model = filled(kv, 160)
    with kv.step([("a", [])]) as reading:
        before = kv.device.warm.read([int(reading.views[0].warm[2])])
    assert kv.evict("a", 64, 96, "cold").evicted == ((64, 96),)
    model.cold.add(2)
    assert kv.states("a")[2] == (State.COLD_DISK if cold == "disk" else State.COLD_HOST)
    check(kv, "a", model)
    for _ in range(2):
        assert kv.rewarm("a", 70, 71).loaded == (2,)
        with kv.step([("a", [])]) as reading:
            after = kv.device.warm.read([int(reading.views[0].warm[2])])
        assert np.array_equal(before, after)
        kv.evict("a", 64, 96, "cold")
    assert len(kv.store) == 1
    kinds = [(event.block, event.tier) for event in kv.events("a")]
    assert kinds == [(2, Tier.COLD), (2, Tier.WARM)] * 2 + [(2, Tier.COLD)]
    kv.close()


def test_a_rotten_record_is_a_lost_block_that_can_be_computed_again():
    """BlockCorrupt; its positions are missing; once they are written the context is whole."""
    kv = make_cache(CONFIG)
    model = filled(kv, 200)
    kv.settle()
    kv.store.record(kv.record_serial("a", 1))[HEADER_BYTES + 5] ^= 0x10
    with pytest.raises(BlockCorrupt, match="block 1"):
        kv.rewarm("a", 32, 96)
    assert kv.missing("a").tolist() == list(range(32, 64))
    model.seeds[32:64] = [None] * 32
    model.kept.add(2)
    check(kv, "a", model)
    model.kept.add(1)
    step(kv, {"a": model}, {"a": (1, list(range(32, 64)))})
    check(kv, "a", model)
    kv.close()


def test_a_context_in_a_step_refuses_everything_else():
    """summary, evict, rewarm, fork, truncate and a second step; release waits for the end."""
    kv = make_cache(CONFIG)
    filled(kv, 40)
    running = kv.begin_step([("a", [40])])
    for call in (
        lambda: kv.summary("a"),
        lambda: kv.evict("a", 0, 1),
        lambda: kv.rewarm("a", 0, 1),
        lambda: kv.fork("a", "b"),
        lambda: kv.truncate("a", 1),
        lambda: kv.begin_step([("a", [41])]),
    ):
        with pytest.raises(InvalidStateError, match="running a step"):
            call()
    kv.release("a")
    assert kv.used_bytes
    kv.end_step(running)
    assert not kv.used_bytes
    with pytest.raises(ContextLost):
        kv.summary("a")
    kv.close()


def test_a_fork_shares_until_it_writes():
    """No byte more at first; one block when the child goes on; the parent keeps its own. What both
    code later is kept once as long as they share it."""
    kv = make_cache(CONFIG)
    models = {"a": filled(kv, 100)}
    alone = kv.used_bytes
    kv.fork("a", "b")
    models["b"] = models["a"].copy()
    assert kv.used_bytes == alone
    step(kv, models, {"b": (2, list(range(100, 120)))})
    assert kv.used_bytes == alone + kv.layout.full_block_bytes
    step(kv, models, {"a": (3, list(range(100, 110)))})
    for ctx, model in models.items():
        check(kv, ctx, model)
    # block 2 (64-95) turns warm in both
    step(kv, models, {"a": (3, list(range(110, 128))), "b": (2, list(range(120, 128)))})
    shared = {ctx: int(v.warm[2]) for ctx, v in views(kv, "a", "b").items()}
    assert shared["a"] == shared["b"] > 0
    kv.release("a")
    check(kv, "b", models["b"])
    kv.release("b")
    kv.settle()
    assert kv.used_bytes == 0
    kv.close()


def test_codes_made_for_another_context_are_used_only_for_the_same_content():
    """One of two contexts codes a shared block. Then the other releases it and a third gets its
    slot, or the other cuts it and writes something else there."""
    for cut in (False, True):
        kv = make_cache(CONFIG)
        models = {"a": filled(kv, 90)}
        kv.fork("a", "b")
        models["b"] = models["a"].copy()
        step(kv, models, {"a": (2, list(range(90, 110)))})
        if cut:
            kv.truncate("b", 40)
            del models["b"].seeds[40:]
            step(kv, models, {"b": (3, list(range(40, 120)))})
        else:
            kv.release("b")
            del models["b"]
            models["c"] = filled(kv, 120, ctx="c")
        for ctx, model in models.items():
            check(kv, ctx, model)
        kv.close()


def views(kv: TieredKV, *names: str):
    with kv.step([(name, []) for name in names]) as reading:
        return {view.context.id: view for view in reading.views}


def test_an_aborted_step_leaves_nothing():
    """Slots, states and rows are as before, also what it had begun to code."""
    kv = make_cache(CONFIG)
    model = filled(kv, 60)
    before = kv.used_bytes
    nan = torch.full((40, HEADS, DIM), torch.nan)
    with pytest.raises(RuntimeError, match="boom"), kv.step([("a", list(range(60, 100)))]) as run:
        kv.write(0, run, nan, nan)
        assert run.failed == {"a"}
        raise RuntimeError("boom")
    assert kv.used_bytes == before
    check(kv, "a", model)
    step(kv, {"a": model}, {"a": (1, list(range(60, 100)))})
    check(kv, "a", model)
    kv.close()


def test_numbers_without_a_code_concern_one_context_only():
    """Its step names it, it reads NaN; the other context of the batch is coded as ever."""
    kv = make_cache(CONFIG)
    kv.open("bad")
    models = {"a": Model(CONFIG)}
    kv.open("a")
    positions = list(range(100))
    with kv.step([("bad", positions), ("a", positions)]) as running:
        for layer in range(LAYERS):
            k, v = rows([1] * 200, positions * 2, layer)
            k[40, 0, 0] = 1e30
            kv.write(layer, running, k, v)
        assert running.failed == {"bad"}
    models["a"].seeds = [1] * 100
    check(kv, "a", models["a"])
    view = views(kv, "bad")["bad"]
    read = kv.read(0, view)
    assert read.warm_keys is not None and read.warm_blocks[0] == 1
    assert read.warm_keys.scale[read.warm_slots[0]].isnan().all()
    kv.close()


def test_freed_blocks_are_nan():
    """With debug_nan, in both pools; block 0 stays finite."""
    kv = make_cache(CONFIG)
    filled(kv, 100)
    kv.release("a")
    assert kv.device.full.keys[0][1:].isnan().all() and not kv.device.full.keys[0][0].any()
    assert kv.device.warm.keys[0].scale[1:].isnan().all()
    kv.close()


def test_deterministic_mode_refuses_instead_of_demoting():
    """CapacityError, and the contexts are untouched."""
    kv = make_cache(CONFIG, num_full=4, num_warm=3)
    model = filled(kv, 60)
    kv.open("b")
    with pytest.raises(CapacityError, match="full-precision KV blocks"):
        kv.begin_step([("b", list(range(100)))])
    check(kv, "a", model)
    with pytest.raises(NotSupportedError, match="wait_complete"):
        kv.rewarm("a", 0, 32, "best_effort")
    kv.close()


def test_memory_pressure_demotes_the_longest_unused_context():
    """Not deterministic: hot blocks of idle contexts are coded, then sent away; all of it is on
    record, and comes back on request."""
    config = TierConfig(hot=320, warm=320, deterministic=False, debug_nan=True)
    kv = make_cache(config, num_full=10, num_warm=4)
    models = {"a": filled(kv, 160), "b": filled(kv, 96, ctx="b")}
    step(kv, models, {"b": (1, list(range(96, 288)))})
    check(kv, "b", models["b"])
    assert [event.tier for event in kv.events("a")] == [Tier.WARM] * 4
    kv.open("c")
    models["c"] = Model(config)
    step(kv, models, {"c": (1, list(range(64)))})
    summary = kv.summary("a")
    assert (summary.num_warm, summary.num_cold) == (64, 64)
    assert [event.block for event in kv.events("b")] == [1, 2]
    models["b"].kept |= {1, 2}
    for ctx in "bc":
        check(kv, ctx, models[ctx])
    kv.release("b")
    kv.rewarm("a", 0, 160)
    models["a"].kept |= {1, 2, 3, 4}
    check(kv, "a", models["a"])
    kv.close()


def test_a_context_may_have_a_hot_zone_of_its_own():
    """Longer: what is coded stays so; shorter: the next step codes what is beyond it. Others keep
    theirs, and deterministic mode refuses."""
    config = TierConfig(hot=64, warm=640, deterministic=False)
    kv = make_cache(config)
    models = {"a": filled(kv, 160), "b": filled(kv, 160, ctx="b")}
    kv.set_hot("a", 160)
    step(kv, models, {"a": (1, list(range(160, 256))), "b": (1, list(range(160, 256)))})
    assert kv.states("a")[1:4] == [State.WARM, State.WARM, State.HOT]
    check(kv, "b", models["b"])
    kv.set_hot("a", 32)
    step(kv, models, {"a": (1, [256])})
    assert kv.states("a")[6:] == [State.WARM, State.HOT, State.HOT]
    kv.close()
    kv = make_cache(CONFIG)
    with pytest.raises(NotSupportedError, match="deterministic"):
        kv.set_hot("a", 64)
    kv.close()


def test_best_effort_arrives_at_a_step_boundary():
    """Cold until a step has ended after the load; timeout says what is still on its way."""
    config = TierConfig(hot=32, warm=64, deterministic=False)
    kv = make_cache(config)
    model = filled(kv, 200)
    kv.settle()
    first = kv.rewarm("a", 0, 96, "best_effort")
    assert set(first.loaded) | set(first.pending) == {1, 2}
    deadline = time.monotonic() + 60
    while State.LOADING in kv.states("a"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    model.kept |= {1, 2}
    check(kv, "a", model)
    late = kv.rewarm("a", 0, 200, "timeout", timeout_s=60.0)
    assert late.loaded == (1, 2, 3, 4) and not late.pending
    kv.close()


def test_a_full_host_keeps_blocks_on_the_device():
    """They are cold by the rule, so nobody reads them, and leave as soon as there is room."""
    config = TierConfig(hot=32, warm=64, host_bytes=4096)
    kv = make_cache(config)
    model = filled(kv, 200)
    kv.settle()
    assert kv.states("a")[1:3] == [State.COLD_HOST, State.WARM]
    with kv.step([("a", [])]) as reading:
        assert reading.views[0].tiers(200)[0].tolist()[1:3] == [Tier.ABSENT] * 2
    kv.rewarm("a", 32, 64)
    model.kept |= {1}
    kv.evict("a", 32, 64)
    step(kv, {"a": model}, {"a": (1, [200])})
    kv.settle()
    assert kv.states("a")[2] == State.COLD_HOST
    kv.close()


def test_truncate_forgets_tokens_and_whole_coded_blocks():
    """Within a hot block to the token; a coded block that would be cut goes and is missing."""
    kv = make_cache(CONFIG)
    model = filled(kv, 130)
    kv.truncate("a", 110)
    del model.seeds[110:]
    step(kv, {"a": model}, {"a": (5, list(range(110, 112)))})
    assert kv.missing("a").tolist() == []
    kv.truncate("a", 70)
    assert kv.missing("a").tolist() == list(range(64, 70))
    kv.close()


def test_rows_are_written_once():
    """A second write of a position is refused, coded or not."""
    kv = make_cache(CONFIG)
    filled(kv, 100)
    for position in (3, 40, 99):
        with pytest.raises(InvalidStateError, match="evict the block"):
            kv.begin_step([("a", [position])])
    kv.close()


def test_latent_attention_stores_one_row():
    """MLA: no value tensors; codes of [latent | rope] serve both."""
    layout = CacheLayout(1, 1, 24, 16, "k8v8", full_bytes=2, latent=True)
    kv = TieredKV(layout, CONFIG, num_full=8, num_warm=8, model_id="mla", dtype=torch.bfloat16)
    kv.open("a")
    k = torch.randn(130, 1, 24, generator=torch.Generator().manual_seed(0))
    with kv.step([("a", list(range(130)))]) as running:
        kv.write(0, running, k, k[..., :16])
        read = kv.read(0, running.views[0])
        assert read.full_values is None and read.warm_values is None
        assert read.warm_keys is not None and read.warm_blocks.tolist() == [1, 2]
        stored = k[32:96].bfloat16().view(2, 32, 1, 24).transpose(1, 2)
        expected = dequantise_keys(quantise_keys(stored))
        pool = dequantise_keys(read.warm_keys)[read.warm_slots]
        assert torch.equal(pool, expected)
    assert kv.device.warm.slot_nbytes == layout.warm_block_bytes == 24 * 36
    kv.close()


@pytest.mark.parametrize("profile", ["k8v8", "k8v4", "literal"])
def test_the_account_is_what_is_allocated(profile: Profile):
    """Slot sizes of the real tensors equal the formula; a pool is its slots and the null slot."""
    layout = CacheLayout(3, 2, 64, 64, profile, full_bytes=4)
    kv = TieredKV(layout, TierConfig(profile=profile), num_full=5, num_warm=7, model_id="m")
    assert kv.device.full.slot_nbytes == layout.full_block_bytes
    assert kv.device.warm.slot_nbytes == layout.warm_block_bytes
    assert kv.allocated_bytes == 6 * layout.full_block_bytes + 8 * layout.warm_block_bytes
    kv.close()


def test_a_disk_that_was_full_for_a_moment_does_not_end_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Blocks stay warm while nothing can be written, with a line that names the disk; once there
    is room they go."""
    with small_disk(tmp_path / "disk", "2M") as disk:
        filler = fill_up(disk)
        config = TierConfig.model_validate(
            {"hot": 32, "warm": 64, "cold": "disk", "directory": disk, "host_bytes": 0}
        )
        kv = make_cache(config)
        filled(kv, 200)
        kv.settle()
        assert State.COLD_DISK not in kv.states("a")
        assert "No space left" in kv.cold_problem
        filler.unlink()
        monkeypatch.setattr("engine.kvcache.cold.RETRY_S", 0.0)
        kv.evict("a", BLOCK, 3 * BLOCK, to="cold")
        kv.settle()
        assert kv.states("a")[1:3] == [State.COLD_DISK] * 2 and kv.cold_problem == ""
        kv.close()
