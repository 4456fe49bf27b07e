"""Byte account by tier: gates of facts/kv-attention.md 1.2 and the pure tier rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout
from engine.kvcache.quantise import BLOCK, Profile
from engine.kvcache.tiers import Tier, cold_end, is_warm, tier_of, warm_end

LENGTHS = [8192 << i for i in range(6)]
K128 = 131072


def layout(profile: Profile) -> CacheLayout:
    return CacheLayout(32, 8, 128, 128, profile)


@pytest.mark.parametrize(("profile", "least"), [("k8v8", 0.71), ("k8v4", 0.73), ("literal", 0.71)])
def test_the_saving_at_128k(profile: Profile, least: float):
    """The whole cache at 128K with cold blocks off the device, against bf16 full."""
    saving = layout(profile).saving(K128, TierConfig(profile=profile))
    assert least <= saving < 0.78


@pytest.mark.parametrize("length", LENGTHS)
def test_codes_alone_never_save_half(length: int):
    """8 bits and scales, everything on the device: below 50 % at every length."""
    config = TierConfig(hot=0, cold="off")
    assert 0.4 < layout("k8v8").saving(length, config) < 0.5


def test_the_table_of_the_facts():
    """Default profile, 8K to 256K: 34.9, 43.6, 45.0, 71.7, 85.8 % (one block of sink less)."""
    config = TierConfig()
    expected = {8192: 0.349, 32768: 0.436, 65536: 0.450, K128: 0.717, 2 * K128: 0.858}
    for length, saving in expected.items():
        assert layout("k8v8").saving(length, config) == pytest.approx(saving, abs=0.003)


def test_latent_attention():
    """576 numbers a token: 648 bytes of 1,152 when warm; 70 % less at 128K."""
    mla = CacheLayout(61, 1, 576, 512, "k8v8", latent=True)
    assert mla.warm_block_bytes == 61 * BLOCK * 648
    assert mla.full_block_bytes == 61 * BLOCK * 1152
    assert mla.saving(K128, TierConfig()) >= 0.70


def test_full_is_bf16_with_a_rounded_end():
    """Profile full saves nothing; the last block is paid whole."""
    plain = layout("full")
    config = TierConfig(profile="full")
    assert plain.bytes(K128, config).device == plain.bf16_bytes(K128)
    assert plain.bytes(33, config).device == plain.bf16_bytes(64)


@given(
    st.integers(1, 4000),
    st.integers(0, 600),
    st.integers(0, 20),
    st.sampled_from(["host", "off"]),
)
def test_bytes_count_the_tiers_block_by_block(t: int, hot: int, warm: int, cold: str):
    """The closed formula equals a sum over tier_of, which agrees with is_warm."""
    config = TierConfig.model_validate({"hot": hot, "warm": BLOCK * warm, "cold": cold})
    account = layout("k8v8").bytes(t, config)
    tiers = [tier_of(block, t, config) for block in range(-(-t // BLOCK))]
    assert tiers[0] == Tier.FULL and tier_of(len(tiers), t, config) == Tier.ABSENT
    assert account.sink + account.hot == tiers.count(Tier.FULL) * layout("k8v8").full_block_bytes
    assert account.warm == tiers.count(Tier.WARM) * layout("k8v8").warm_block_bytes
    assert account.cold == tiers.count(Tier.COLD) * layout("k8v8").record_bytes
    for block, tier in enumerate(tiers):
        assert (tier != Tier.FULL) == is_warm(block, t, hot)
    assert cold_end(t, config) <= warm_end(t, config) <= max(1, len(tiers))


def test_disk_needs_a_folder():
    """The message says what to name."""
    with pytest.raises(ValidationError, match="directory"):
        TierConfig(cold="disk")
