"""The hot-zone controller acts on what it is specified to, and only there."""

import math
import random

import pytest
import torch

from engine.bench.hot_zone import Shape, measure
from engine.errors import NotSupportedError
from engine.kvcache.hot_zone import HotSignal, HotZoneConfig, HotZoneController, hot_signal

ABSOLUTE = HotZoneConfig(mode="absolute", mean_over=1)


def test_three_focused_steps_in_a_row_grow_the_zone_by_512():
    controller = HotZoneController(ABSOLUTE, 2048, deterministic=False)
    lengths = [controller.observe(HotSignal(e, 0.0)) for e in (0.2, 0.2, 0.5, 0.2, 0.2, 0.2)]
    assert lengths == [2048] * 5 + [2560]


def test_global_search_takes_the_zone_back_to_its_start():
    controller = HotZoneController(ABSOLUTE, 2048, deterministic=False)
    for _ in range(6):
        controller.observe(HotSignal(0.1, 0.0))
    assert controller.hot == 3072
    lengths = [controller.observe(HotSignal(0.8, 0.0)) for _ in range(3)]
    assert lengths == [3072, 3072, 2048]


def test_opposite_wishes_do_not_add_up():
    controller = HotZoneController(ABSOLUTE, 2048, deterministic=False)
    assert {controller.observe(HotSignal(e, 0.0)) for e in (0.1, 0.1, 0.9) * 5} == {2048}


def test_the_zone_stays_between_its_start_and_the_maximum():
    config = HotZoneConfig(mode="absolute", mean_over=1, maximum=2560)
    controller = HotZoneController(config, 2048, deterministic=False)
    assert {controller.observe(HotSignal(0.1, 0.0)) for _ in range(30)} == {2048, 2560}
    assert [controller.observe(HotSignal(0.9, 0.0)) for _ in range(30)][-1] == 2048


def _steps(count: int, beyond: float = 0.03) -> list[HotSignal]:
    """Entropies in the range measured on a real model (facts/kv-attention.md 1.2)."""
    draw = random.Random(0)
    return [
        HotSignal(draw.uniform(0.339, 0.388), beyond * draw.uniform(0.5, 1.5)) for _ in range(count)
    ]


def test_fixed_thresholds_never_act_on_the_entropies_of_a_real_model():
    """The documented null result of the literal mode."""
    controller = HotZoneController(HotZoneConfig(mode="absolute"), 2048, deterministic=False)
    assert {controller.observe(signal) for signal in _steps(2000)} == {2048}


def test_quantile_mode_watches_first_and_then_grows_for_mass_beyond_the_edge():
    controller = HotZoneController(HotZoneConfig(), 2048, deterministic=False)
    assert {controller.observe(signal) for signal in _steps(256)} == {2048}
    assert controller.thresholds is not None
    low, high, beyond = controller.thresholds
    assert 0.339 < low < high < 0.388 and 0.03 < beyond < 0.045
    assert [controller.observe(HotSignal(0.36, 0.2)) for _ in range(3)] == [2048, 2048, 2560]


def test_a_sharp_focus_far_away_does_not_grow_the_zone():
    controller = HotZoneController(HotZoneConfig(), 2048, deterministic=False)
    for signal in _steps(256):
        controller.observe(signal)
    assert {controller.observe(HotSignal(0.1, 0.001)) for _ in range(20)} == {2048}


def test_quantile_mode_shrinks_step_by_step_when_nothing_is_near_the_edge():
    controller = HotZoneController(HotZoneConfig(), 2048, deterministic=False)
    for signal in [*_steps(256), *[HotSignal(0.36, 0.2)] * 6]:
        controller.observe(signal)
    assert controller.hot == 3072
    lengths = [controller.observe(HotSignal(0.6, 0.0)) for _ in range(9)]
    assert lengths[2::3] == [2560, 2048, 2048]


def test_a_deterministic_context_has_no_controller():
    with pytest.raises(NotSupportedError, match="learner cannot replay"):
        HotZoneController(HotZoneConfig(), 2048, deterministic=True)


@pytest.mark.parametrize("hot", [0, 100, 16384])
def test_a_zone_that_no_block_boundary_fits_is_refused(hot):
    with pytest.raises(ValueError, match="multiple of 32 up to 8192"):
        HotZoneController(HotZoneConfig(), hot, deterministic=False)


def test_thresholds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="less than its high"):
        HotZoneConfig(low=0.8)


def test_the_signal_leaves_the_sink_out():
    """Half of the mass on the sink changes neither number."""
    weights = torch.rand(4, 4096, generator=torch.Generator().manual_seed(0))
    weights[:, :32] = 0
    weights /= weights.sum(dim=1, keepdim=True)
    without = hot_signal(weights, 4096, hot=1024)
    weights /= 2
    weights[:, 0] = 0.5
    sinking = hot_signal(weights, 4096, hot=1024)
    assert sinking.entropy == pytest.approx(without.entropy, abs=1e-5)
    assert sinking.beyond == pytest.approx(without.beyond, abs=1e-5)
    assert without.entropy > 0.95 and without.beyond == pytest.approx(512 / 4064, rel=0.1)


def test_entropy_is_that_of_the_distribution_without_the_sink():
    weights = torch.rand(3, 200, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    shares = weights[:, 32:] / weights[:, 32:].sum(dim=1, keepdim=True)
    expected = torch.distributions.Categorical(probs=shares).entropy().mean() / math.log(168)
    assert hot_signal(weights, 200, hot=64).entropy == pytest.approx(float(expected), abs=1e-6)


def test_the_signal_of_mass_at_one_place():
    weights = torch.zeros(2, 4096)
    weights[:, 4096 - 1024 - 3] = 1.0
    signal = hot_signal(weights, 4096, hot=1024)
    assert signal.entropy == pytest.approx(0.0) and signal.beyond == pytest.approx(1.0)
    assert hot_signal(weights, 4096, hot=2048).beyond == 0.0


def test_what_retrieval_read_gives_the_same_mass_as_all_positions():
    """Weights of the positions that hybrid attention read, in its order, with padding."""
    draw = torch.Generator().manual_seed(2)
    positions = torch.cat([torch.randperm(4096, generator=draw)[:600], torch.tensor([-1, -1])])
    weights = torch.rand(3, 602, generator=draw)
    weights[:, 600:] = 0
    weights /= weights.sum(dim=1, keepdim=True)
    whole = torch.zeros(3, 4096).index_copy_(1, positions[:600], weights[:, :600])
    read = hot_signal(weights, 4096, hot=1024, positions=positions)
    by_head = hot_signal(weights, 4096, hot=1024, positions=positions.expand(3, -1))
    assert read.beyond == pytest.approx(hot_signal(whole, 4096, hot=1024).beyond, abs=1e-6)
    assert read == by_head and 0.9 < read.entropy <= 1.0


@pytest.mark.parametrize("length", [1, 32, 33, 40])
def test_short_contexts_and_sink_only_heads_give_a_signal(length):
    weights = torch.zeros(2, length)
    weights[:, 0] = 1.0
    assert hot_signal(weights, length, hot=2048) == HotSignal(0.0, 0.0)


def test_the_bench_gives_a_line_for_full_and_hybrid_steps():
    shape = Shape(layers=1, heads=4, kv_heads=2, head_dim=8, hidden=32, width=64)
    costs = measure(shape, 2048, repeats=1)
    assert [cost.name for cost in costs] == ["full", "hybrid"]
    assert all(cost.share > 0 and f"{cost.share:.2%} of a step" in cost.line() for cost in costs)


@pytest.mark.slow
@pytest.mark.parametrize("context", [8192, 32768])
def test_the_controller_costs_less_than_two_percent_of_a_step(context):
    torch.set_num_threads(1)
    assert all(cost.share < 0.02 for cost in measure(Shape(), context, repeats=5))
