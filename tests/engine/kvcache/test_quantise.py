"""Codes of the warm tier: error bounds, rounding, planes, extremes, gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.errors import EngineError, QuantiseError
from engine.kvcache.quantise import (
    BLOCK,
    SCALE_FLOOR,
    Profile,
    WarmKeys,
    WarmValues,
    dequantise_keys,
    dequantise_values,
    fake_quantise,
    key_codes,
    pack_key_codes,
    quantise_keys,
    quantise_values,
    value_codes,
)

CODED: list[Profile] = ["k8v8", "k8v4", "literal"]


def half_step(x: Tensor) -> Tensor:
    """Half the distance to the next fp16 number."""
    return torch.from_numpy(np.abs(np.spacing(x.contiguous().numpy())).astype(np.float32)) / 2


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """[B, G, 32, D] with channel means and magnitudes of many sizes, some channels constant."""
    seed = draw(st.integers(0, 2**20))
    shape = (draw(st.integers(0, 2)), draw(st.integers(1, 2)), BLOCK, 4 * draw(st.integers(1, 9)))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator)
    magnitude = 10.0 ** draw(st.integers(-6, 3))
    mean = draw(st.sampled_from([0.0, 1.0, 30.0])) * magnitude
    x = noise * magnitude + mean * torch.randn(shape[3], generator=generator)
    if draw(st.booleans()):
        x[..., 0] = draw(st.sampled_from([0.0, 3.0, -70.5]))
    # what fp16 cannot hold is refused, see the tests of that
    return x.clamp(-60_000.0, 60_000.0)


@given(blocks())
def test_the_error_of_a_key_is_half_a_step(k: Tensor):
    """Half a code step, unless the fp16 of minimum or scale is the coarser one."""
    keys = quantise_keys(k)
    error = (dequantise_keys(keys) - k).abs()
    scale, cut = keys.scale.float(), 255 * half_step(keys.scale)
    bound = torch.maximum(scale / 2, torch.maximum(half_step(keys.minimum), cut))
    slack = 1e-6 * k.abs() + 1e-9
    assert (error <= bound[:, :, None] * 1.001 + slack).all()


@given(blocks(), st.sampled_from(CODED))
def test_the_error_of_a_value_is_half_a_step(v: Tensor, profile: Profile):
    """Same bound; 4-bit steps are 17 times wider than 8-bit ones."""
    values = quantise_values(v, profile)
    error = (dequantise_values(values) - v).abs()
    cut = (15 if profile == "k8v4" else 127) * half_step(values.scale)
    bound = torch.maximum(values.scale.float() / 2, cut)
    if values.minimum is not None:
        bound = torch.maximum(bound, half_step(values.minimum))
        bound = bound.repeat_interleave(32, dim=3)[..., : v.shape[3]]
    else:
        bound = bound[..., None]
    assert (error <= bound * 1.001 + 1e-6 * v.abs() + 1e-9).all()


@given(st.integers(0, 2**20), st.integers(1, 8))
def test_planes_hold_every_bit(seed: int, quads: int):
    """pack and unpack are inverse, and each channel sits in the bits the layout names."""
    codes = torch.randint(
        256, (2, 3, BLOCK, 4 * quads), generator=torch.Generator().manual_seed(seed)
    ).to(torch.uint8)
    scale = torch.ones(2, 3, 4 * quads, dtype=torch.float16)
    keys = pack_key_codes(codes, scale, scale)
    assert keys.top.shape == keys.mid.shape == (2, 3, quads, BLOCK)
    assert keys.low.shape == (2, 3, 2 * quads, BLOCK)
    assert torch.equal(key_codes(keys), codes)
    for channel in range(4 * quads):
        code = codes[..., channel]
        quad, bits = channel // 4, 2 * (channel % 4)
        assert torch.equal((keys.top[:, :, quad] >> bits) & 3, code >> 6)
        assert torch.equal((keys.mid[:, :, quad] >> bits) & 3, (code >> 4) & 3)
        nibble = keys.low[:, :, channel // 2] >> (4 * (channel % 2))
        assert torch.equal(nibble & 15, code & 15)


def test_ties_round_to_even():
    """0.5, 1.5, 2.5 steps become codes 0, 2, 2; numpy's rint agrees everywhere."""
    k = torch.zeros(1, 1, BLOCK, 4)
    k[0, 0, :, 0] = torch.linspace(0, 255, BLOCK)
    k[0, 0, 1:6, 0] = torch.tensor([0.5, 1.5, 2.5, 3.5, 254.5])
    codes = key_codes(quantise_keys(k))[0, 0, :, 0]
    assert codes[1:6].tolist() == [0, 2, 2, 4, 254]
    assert np.array_equal(codes.numpy(), np.rint(k[0, 0, :, 0].numpy()).astype(np.uint8))
    v = torch.zeros(1, 1, BLOCK, 4)
    v[0, 0, 0] = torch.tensor([127, 0.5, -1.5, -2.5])
    assert value_codes(quantise_values(v))[0, 0, 0].tolist() == [127, 0, -2, -2]


@pytest.mark.parametrize("profile", CODED)
@pytest.mark.parametrize("number", [0.0, 5.0, -0.125, 1e-7, 2.0**-30, 6e4])
def test_constant_blocks_come_back(profile: Profile, number: float):
    """No division by zero; what fp16 can hold comes back to within half a floor."""
    x = torch.full((1, 2, BLOCK, 32), number)
    keys, values = quantise_keys(x, profile), quantise_values(x, profile)
    for back in (dequantise_keys(keys), dequantise_values(values)):
        torch.testing.assert_close(back, x, rtol=5e-4, atol=SCALE_FLOOR / 2)
    if not number:
        assert not dequantise_keys(keys).any() and not dequantise_values(values).any()


@pytest.mark.parametrize("profile", CODED)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_numbers_without_a_code_are_refused(profile: Profile, number: float):
    """One bad number in a block is an EngineError and a ValueError, not a wrong cache."""
    x = torch.ones(1, 1, BLOCK, 32)
    x[0, 0, 3, 5] = number
    for quantise in (quantise_keys, quantise_values):
        with pytest.raises(QuantiseError) as caught:
            quantise(x, profile)
        assert isinstance(caught.value, EngineError) and isinstance(caught.value, ValueError)


def test_shapes_that_have_no_planes_are_refused():
    """The message names the shape."""
    with pytest.raises(QuantiseError, match=r"\(1, 1, 32, 6\)"):
        quantise_keys(torch.zeros(1, 1, BLOCK, 6))
    with pytest.raises(QuantiseError, match="full"):
        quantise_values(torch.zeros(1, 1, BLOCK, 4), "full")


def test_the_literal_profile_has_one_scale_per_block_and_head():
    """Symmetric: zero is code 128 and comes back as zero."""
    k = torch.randn(3, 2, BLOCK, 8, generator=torch.Generator().manual_seed(0))
    k[0, 0, 0, 0] = 0.0
    keys = quantise_keys(k, "literal")
    assert (keys.scale == keys.scale[..., :1]).all()
    assert torch.equal(keys.minimum.float(), -128 * keys.scale.float())
    assert key_codes(keys)[0, 0, 0, 0] == 128 and dequantise_keys(keys)[0, 0, 0, 0] == 0
    values = quantise_values(k, "literal")
    assert (values.scale == values.scale[..., :1]).all()


def test_channels_with_means_are_why_keys_are_asymmetric():
    """Relative error on keys with channel means: k8v8 is several times below literal."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(8, 2, BLOCK, 64, generator=generator)
    k = k + 10 * torch.randn(64, generator=generator)

    def error(profile: Profile) -> float:
        return float((dequantise_keys(quantise_keys(k, profile)) - k).norm() / k.norm())

    assert error("k8v8") < 0.001 and error("literal") > 5 * error("k8v8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("profile", [*CODED, "full"])
def test_fake_quantisation_is_the_cache_with_a_straight_gradient(
    profile: Profile, dtype: torch.dtype
):
    """Forward bits are those of dequantise(quantise(.)), the gradient is that of identity."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, BLOCK, 12, generator=generator).to(dtype).requires_grad_()
    v = torch.randn(2, 2, BLOCK, 40, generator=generator).to(dtype).requires_grad_()
    fake_k, fake_v = fake_quantise(k, v, profile)
    if profile == "full":
        assert fake_k is k and fake_v is v
    else:
        assert torch.equal(fake_k, dequantise_keys(quantise_keys(k, profile)).to(dtype))
        assert torch.equal(fake_v, dequantise_values(quantise_values(v, profile)).to(dtype))
    (2 * fake_k.sum() + 3 * fake_v.sum()).backward()
    assert k.grad is not None and (k.grad == 2).all()
    assert v.grad is not None and (v.grad == 3).all()


def test_the_value_of_latent_attention_is_read_from_its_keys():
    """MLA: 512 + 64 channels of one head take 648 bytes a token; the latent part is the value."""
    k = torch.randn(2, 1, BLOCK, 576, generator=torch.Generator().manual_seed(0))
    keys = quantise_keys(k)
    stored = sum(t.numel() * t.element_size() for t in tensors(keys))
    assert stored == 2 * BLOCK * 648
    value = dequantise_keys(keys)[..., :512]
    assert float((value - k[..., :512]).norm() / k[..., :512].norm()) < 0.007


def test_bytes_of_a_block():
    """facts 4.1: 8,768 bytes a kv head and layer at 128 channels; 7,168 with 4-bit values."""
    x = torch.randn(1, 1, BLOCK, 128, generator=torch.Generator().manual_seed(0))
    keys = sum(t.numel() * t.element_size() for t in tensors(quantise_keys(x)))
    sizes: dict[Profile, int] = {"k8v8": 8768, "k8v4": 7168}
    for profile, expected in sizes.items():
        values = quantise_values(x, profile)
        assert keys + sum(t.numel() * t.element_size() for t in tensors(values)) == expected


def tensors(coded: WarmKeys | WarmValues) -> list[Tensor]:
    if isinstance(coded, WarmKeys):
        return [coded.top, coded.mid, coded.low, coded.minimum, coded.scale]
    return [t for t in (coded.codes, coded.scale, coded.minimum) if t is not None]
