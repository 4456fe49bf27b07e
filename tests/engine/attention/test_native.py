"""The compiled decode step against the torch reference, for each instruction set of the machine."""

import shutil

import pytest
import torch

from engine.attention import native
from engine.attention.codes import scan_codes
from engine.attention.hybrid import attend_hybrid, attend_reference
from engine.attention.native import build
from engine.attention.sequence import view_of
from engine.attention.view import LayerView, WarmBlocks
from engine.errors import AttentionError
from engine.kvcache.quantise import WarmKeys, WarmValues
from tests.engine.attention.cases import random_case, small_config

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
HOT = 70


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == build.best_instructions() else pytest.mark.slow)
        for name in build.supported_instructions()
    ],
)
def lib(request: pytest.FixtureRequest):
    """Compiled on the first run on a machine, some ten seconds each, then taken from the cache."""
    return native.load(request.param)


def check(lib, case, view: LayerView, config) -> None:
    scaled = case.q[-1] * case.q.shape[-1] ** -0.5
    got = native.decode_with(lib, scaled, view, config)
    want = attend_reference(scaled, view, config)
    torch.testing.assert_close(got[0], want.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got[1], want.lse, atol=2e-6, rtol=1e-5)
    if want.selected is None:
        assert got[2] is None
    else:
        assert got[2] is not None and torch.equal(got[2], want.selected)


@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(4, 1, 128), (5, 1, 16), (8, 2, 64), (7, 7, 48)]
)
def test_the_scan_has_the_bits_of_torch(lib, heads: int, groups: int, dim: int):
    case = random_case(300, heads, groups, dim)
    view = view_of(case.k, case.v, HOT)
    scaled = case.q[-1] * dim**-0.5
    assert view.warm is not None
    want = scan_codes(scaled.view(1, groups, -1, dim), view.warm)[0]
    assert torch.equal(native.scan_with(lib, scaled, view), want)


def test_the_scan_has_the_bits_of_torch_at_extremes(lib):
    """Zero, tiny and huge queries; constant, zero and large keys."""
    case = random_case(300, 4, 2, 32)
    case.k[32:64] = 0.0
    case.k[64:96] = 7.0
    case.k[96:128] *= 1e4
    view = view_of(case.k, case.v, HOT)
    assert view.warm is not None
    for factor in (0.0, 1e-38, 1e-20, 1e6):
        scaled = case.q[-1] * factor
        want = scan_codes(scaled.view(1, 2, 2, 32), view.warm)[0]
        assert torch.equal(native.scan_with(lib, scaled, view), want)


@pytest.mark.parametrize("length", [1, 20, 32, 33, 100, 101, 134, 200, 333])
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_chooses_and_reads_what_torch_does(lib, length: int, shared: bool):
    case = random_case(length, value=40)
    view = view_of(case.k, case.v, HOT)
    check(lib, case, view, small_config(topk_shared=shared))


@pytest.mark.parametrize(("last", "dense_below"), [(40, 0), (229, 0), (229, 1000)])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_rows_have_the_bits_of_each(lib, last: int, dense_below: int, num_threads: int):
    """Neighbouring queries with the same warm blocks, from within the sink on, over threads."""
    count = 32
    case = random_case(last)
    scaled = case.q[-count:] * case.q.shape[-1] ** -0.5
    config = small_config(dense_below=dense_below)
    out = torch.empty(count, 4, case.v.shape[2])
    selected = torch.full((count, 2, 2, config.topk), -1, dtype=torch.int32)
    rows = native.Rows(lib, config, scaled, out, selected)
    # the last one of these turns no block warm: (229 - 70) % 32 = 31
    view = view_of(case.k, case.v, HOT)
    rows.add(view, 0, count)
    rows.run(num_threads)
    for row, length in enumerate(range(last - count + 1, last + 1)):
        hot = max(0, length - view.hot_start)
        sink = min(length, 32)
        alone = LayerView(
            length,
            view.sink_k[:, :sink],
            view.sink_v[:, :sink],
            view.hot_k[:, :hot],
            view.hot_v[:, :hot],
            view.warm,
        )
        want = native.decode_with(lib, scaled[row], alone, config)
        assert torch.equal(out[row], want[0])
        if want[2] is not None:
            assert torch.equal(selected[row], want[2])
        else:
            assert (selected[row] == -1).all()


@pytest.mark.parametrize("profile", ["k8v8", "k8v4", "literal", "full"])
@pytest.mark.parametrize("dense_below", [0, 1000])
def test_every_profile_and_dense_contexts(lib, profile, dense_below: int):
    case = random_case(250, heads=6, groups=1, dim=64, value=48)
    view = view_of(case.k, case.v, HOT, profile)
    check(lib, case, view, small_config(dense_below=dense_below))


def test_latent_values_scattered_slots_and_cold_gaps(lib):
    case = random_case(330, heads=4, groups=1, dim=64)
    for value_dim, v in ((32, None), (24, case.v)):
        view = view_of(case.k, v, HOT, value_dim=value_dim)
        assert view.warm is not None
        order = torch.tensor([5, 0, 3, 6, 2, 1, 4])
        pools = view.warm.keys, view.warm.values
        old = pools[0]
        keys = WarmKeys(*(x[order] for x in (old.top, old.mid, old.low, old.minimum, old.scale)))
        values = pools[1] and WarmValues(pools[1].codes[order], pools[1].scale[order])
        kept = torch.tensor([0, 1, 4, 6])
        warm = WarmBlocks(keys, values, view.warm.blocks[kept], order.argsort()[kept])
        part = LayerView(330, view.sink_k, view.sink_v, view.hot_k, view.hot_v, warm)
        for dense_below in (0, 1000):
            check(lib, case, part, small_config(dense_below=dense_below))


def test_bf16_hot_tokens_and_index_none(lib):
    case = random_case(200)
    view = view_of(case.k, case.v, HOT)
    half = LayerView(
        200,
        view.sink_k.bfloat16(),
        view.sink_v.bfloat16(),
        view.hot_k.bfloat16(),
        view.hot_v.bfloat16(),
        view.warm,
    )
    check(lib, case, half, small_config())
    check(lib, case, view, small_config(index="none"))


def test_equal_keys_are_chosen_by_position(lib):
    """Every far key is the same: the choice is the first eight far tokens."""
    case = random_case(300)
    case.k[32:268] = case.k[32]
    view = view_of(case.k, case.v, HOT)
    check(lib, case, view, small_config(topk=8, candidates=24))


def test_auto_takes_the_library_and_require_says_what_it_lacks():
    case = random_case(200)
    view = view_of(case.k, case.v, HOT)
    native.load()
    config = small_config(native="auto")
    assert native.why_not(view, config) is None
    torch.testing.assert_close(
        attend_hybrid(case.q[-1], view, config).out,
        attend_hybrid(case.q[-1], view, small_config()).out,
        atol=2e-6,
        rtol=1e-5,
    )
    with pytest.raises(AttentionError, match="'require', but it has no index 'quest'"):
        attend_hybrid(case.q[-1], view, small_config(native="require", index="quest"))


def test_a_machine_without_a_compiler_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PARL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler 'no-such-compiler'"):
        build.library("plain")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.BuildError, match=r"'false' failed on attend\.cpp"):
        build.library("plain")


def test_instruction_sets_are_ordered_and_supported():
    assert build.supported_instructions()[-1] == "plain"
    assert build.best_instructions() == build.supported_instructions()[0]
