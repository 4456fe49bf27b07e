"""Payloads of cold records and reports, taken apart."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from engine.kvcache.layout import CacheLayout
from engine.kvcache.payload import layer_codes
from engine.kvcache.pools import WarmPool
from engine.kvcache.quantise import BLOCK, Profile, dequantise_keys, dequantise_values


@pytest.mark.parametrize(("profile", "latent"), product(("k8v8", "k8v4", "literal"), (False, True)))
def test_a_payload_reads_as_its_pool(profile: Profile, latent: bool):
    """Any slots, every layer, all profiles: the same numbers, from as many bytes as promised."""
    layout = CacheLayout(3, 2, 8, 6, profile, latent=latent)
    pool = WarmPool(layout, 5, "cpu", nan=True)
    generator = torch.Generator().manual_seed(1)
    slots = torch.tensor(pool.take(4))
    for layer in range(3):
        k = torch.randn(4, 2, BLOCK, 8, generator=generator) * 3 + 1
        v = torch.randn(4, 2, BLOCK, 6, generator=generator)
        assert pool.write(layer, slots, k, v) == []
    wanted = [4, 1, 3]
    payload = torch.from_numpy(pool.read(wanted))
    assert payload.shape == (3, layout.warm_block_bytes)
    for layer in range(3):
        keys, values = layer_codes(payload, layout, layer)
        assert torch.equal(dequantise_keys(keys), dequantise_keys(pool.keys[layer])[wanted])
        assert (values is None) == latent
        if values is not None:
            expected = dequantise_values(pool.values[layer])[wanted]
            assert torch.equal(dequantise_values(values), expected)
