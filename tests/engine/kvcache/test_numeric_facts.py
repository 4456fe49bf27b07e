"""Numbers survive ten rounds of evicting and warming again, through records on disk and the router.

The model is the smallest that can state a number: a token of a fact's block answers the query of
that fact, and its value holds six digits, ten channels each, amid noise. The number is read by
attention over every block that the device has. What is lost on the way shows as a wrong digit.
"""

import numpy as np
import pytest
import torch

from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout
from engine.kvcache.quantise import BLOCK, WarmKeys, WarmValues, dequantise_keys, dequantise_values
from engine.kvcache.router import ColdRouter, HashingEncoder, SynonymTable
from engine.kvcache.tiered import TieredKV

FACTS, HEADS, SIZE, DIGITS, ROUNDS, HOT = 16, 2, 64, 6, 10, 64
LENGTH = BLOCK * (1 + FACTS) + 2 * HOT
SUBJECTS = [
    *("rent", "parcel", "salary", "battery", "permit", "invoice", "holiday", "password"),
    *("warranty", "luggage", "tribunal", "copyright", "audit", "sickness", "flight", "discount"),
]


class Facts:
    """Keys, values, texts and the numbers they state; block 1 + i holds fact i."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(5)
        self.numbers = torch.randint(10, (FACTS, DIGITS), generator=draw)
        self.queries = torch.randn(FACTS, SIZE, generator=draw)
        self.queries /= self.queries.norm(dim=1, keepdim=True)
        # keys of real models have large means per channel (facts/kv-attention.md 1.2)
        self.k = torch.randn(LENGTH, HEADS, SIZE, generator=draw) + 4 * torch.randn(
            SIZE, generator=draw
        )
        self.v = 0.15 * torch.randn(LENGTH, HEADS, SIZE, generator=draw)
        for fact in range(FACTS):
            at = BLOCK * (1 + fact) + 3 + fact % 20
            self.k[at] += 40 * self.queries[fact]
            for digit, number in enumerate(self.numbers[fact].tolist()):
                self.v[at, :, 10 * digit + number] += 1.0
        self.texts = {
            1 + fact: f"The {SUBJECTS[fact]} of case {fact} amounts to "
            + "".join(map(str, self.numbers[fact].tolist()))
            for fact in range(FACTS)
        }


def _read(cache: TieredKV, query: torch.Tensor) -> torch.Tensor:
    """Digits [HEADS, DIGITS] by softmax attention over what the device has."""
    with cache.step([("a", [])]) as step:
        read = cache.read(0, step.views[0])
        assert read.full_values is not None and read.warm_keys is not None
        assert read.warm_values is not None
        slots = read.warm_slots
        keys, values = read.warm_keys, read.warm_values
        warm = WarmKeys(
            *(part[slots] for part in (keys.top, keys.mid, keys.low, keys.minimum, keys.scale))
        )
        k = torch.cat([read.full_keys[read.full_slots], dequantise_keys(warm)])
        v = torch.cat(
            [
                read.full_values[read.full_slots],
                dequantise_values(WarmValues(values.codes[slots], values.scale[slots])),
            ]
        )
        k, v = k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)
        out = (k @ query).softmax(dim=1)[:, None] @ v
    return out[:, 0, : 10 * DIGITS].unflatten(1, (DIGITS, 10)).argmax(dim=2)


def _codes(cache: TieredKV) -> dict[int, bytes]:
    """Bytes of every warm block of layer 0."""
    with cache.step([("a", [])]) as step:
        read = cache.read(0, step.views[0])
        assert read.warm_keys is not None and read.warm_values is not None
        keys, values = read.warm_keys, read.warm_values
        parts = (keys.top, keys.mid, keys.low, keys.minimum, keys.scale, values.codes, values.scale)
        return {
            block: b"".join(part[slot].contiguous().numpy().tobytes() for part in parts)
            for block, slot in zip(read.warm_blocks.tolist(), read.warm_slots.tolist(), strict=True)
        }


@pytest.mark.parametrize("cold", ["host", "disk"])
def test_numbers_survive_ten_evictions(cold, tmp_path):
    """At most 0.9 % of digits wrong is asked for; it is none, and codes and summaries are the same
    bits. Before a fact is warm again it is not found."""
    facts = Facts()
    layout = CacheLayout(1, HEADS, SIZE, SIZE, full_bytes=4)
    config = TierConfig(
        hot=HOT,
        cold=cold,
        directory=tmp_path,
        host_bytes=(4 if cold == "disk" else 64) * layout.record_bytes,
        deterministic=False,
        debug_nan=True,
    )
    cache = TieredKV(layout, config, num_full=LENGTH // BLOCK, num_warm=FACTS + 8, model_id="facts")
    cache.open("a")
    with cache.step([("a", np.arange(LENGTH))]) as step:
        cache.write(0, step, facts.k, facts.v)
    router = ColdRouter(HashingEncoder(), SynonymTable.load())
    first, end = _codes(cache), BLOCK * (1 + FACTS)
    assert set(facts.texts) <= set(first)
    summaries: dict[int, torch.Tensor] = {}
    wrong = lost = 0
    for round_ in range(ROUNDS):
        cache.evict("a", BLOCK, end, to="cold")
        if round_ == 0:
            router.add(facts.texts)
            summaries = {block: router.summary(block) for block in facts.texts}
        else:
            router.evicted(facts.texts)
        assert not set(facts.texts) & set(_codes(cache))
        for fact in range(FACTS):
            if round_ == 0:
                before = _read(cache, facts.queries[fact])
                lost += int((before != facts.numbers[fact]).any())
            block = router.route(f"How large is the {SUBJECTS[fact]}?", budget=1).block_ids[0]
            assert block == 1 + fact
            cache.rewarm("a", BLOCK * block, BLOCK * (block + 1))
            router.warmed([block])
            wrong += int((_read(cache, facts.queries[fact]) != facts.numbers[fact]).sum())
        assert _codes(cache) == first
    asked = ROUNDS * FACTS * HEADS * DIGITS
    assert wrong == 0, f"{wrong} of {asked} digits wrong = {wrong / asked:.2%}; allowed 0.9 %"
    assert lost == FACTS, "a fact was read whose block was not on the device"
    assert all(torch.equal(summary, router.summary(block)) for block, summary in summaries.items())
    cache.close()
