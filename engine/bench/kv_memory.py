"""What a context's KV takes on the device, by formula and by real tensors.

``python -m engine.bench.kv_memory``. Formulas are for the whole model; the measurement writes a
context into a TieredKV of one layer and one kv head, whose bytes scale with both. The baseline is
the same context in bf16, without blocks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch

from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout, TierBytes
from engine.kvcache.quantise import BLOCK, Profile
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import cold_end, warm_end

K = 1024
LENGTHS = [8 * K << i for i in range(6)]
CHUNK = 512
GIB = 1 << 30
MODELS = {
    "32 layers, 8 kv heads x 128": CacheLayout(32, 8, 128, 128),
    "SmolLM2-135M (30, 3 x 64)": CacheLayout(30, 3, 64, 64),
    "K2.5, latent (61, 576)": CacheLayout(61, 1, 576, 512, latent=True),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one layer and kv head after the last step; ``allocated`` also counts the null slots
    and the room that a chunk of prefill needs before it is coded."""

    used: int
    allocated: int
    host: int
    formula: TierBytes
    bf16: int


def with_profile(layout: CacheLayout, profile: Profile) -> CacheLayout:
    return CacheLayout(
        layout.num_layers,
        layout.heads,
        layout.key_dim,
        layout.value_dim,
        profile,
        layout.full_bytes,
        layout.latent,
    )


def measure(context: int, config: TierConfig, key_dim: int = 128, chunk: int = CHUNK) -> Measured:
    """Write ``context`` random bf16 rows in chunks and count. The rows repeat after one chunk."""
    layout = CacheLayout(1, 1, key_dim, key_dim, config.profile)
    num_warm = warm_end(context, config) - cold_end(context, config)
    num_full = -(-context // BLOCK) - warm_end(context, config) + 1
    in_flight = chunk // BLOCK + 1
    kv = TieredKV(
        layout,
        config,
        num_full=num_full + in_flight,
        num_warm=num_warm + in_flight,
        model_id="bench",
        dtype=torch.bfloat16,
    )
    kv.open("a")
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, chunk, 1, key_dim, generator=generator).bfloat16()
    for start in range(0, context, chunk):
        count = min(chunk, context - start)
        with kv.step([("a", range(start, start + count))]) as step:
            kv.write(0, step, k[:count], v[:count])
    kv.settle()
    measured = Measured(
        kv.used_bytes,
        kv.allocated_bytes,
        kv.host_bytes,
        layout.bytes(context, config),
        layout.bf16_bytes(context),
    )
    kv.close()
    return measured


def savings(layout: CacheLayout) -> list[str]:
    """Rows of the table of savings against bf16, in per cent."""
    variants: list[tuple[str, TierConfig]] = [
        ("k8v8, hot 2K, warm 64K", TierConfig()),
        ("k8v4", TierConfig(profile="k8v4")),
        ("literal", TierConfig(profile="literal")),
        ("k8v8 alone, all on the device", TierConfig(hot=0, cold="off")),
        ("full, in blocks", TierConfig(profile="full")),
    ]
    lines = [f"{'saving':<32}" + "".join(f"{n // K:>7}K" for n in LENGTHS)]
    for name, config in variants:
        own = with_profile(layout, config.profile)
        cells = "".join(f"{100 * own.saving(n, config):>7.1f}%" for n in LENGTHS)
        lines.append(f"{name:<32}{cells}")
    return lines


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest measured context")
    args = parser.parse_args(arguments)
    out = sys.stdout.write
    for name, layout in MODELS.items():
        out(f"\n{name}\n" + "\n".join(savings(layout)) + "\n")
        full = layout.bf16_bytes(120 * K)
        tiered = layout.bytes(120 * K, TierConfig())
        out(
            f"contexts of 120K in a GiB: full bf16 {GIB / full:.3f}, "
            f"tiered {GIB / tiered.device:.3f}, each with {tiered.cold / GIB:.2f} GiB on the host\n"
        )
    out("\nmeasured: one layer, one kv head x 128, default profile; KiB\n")
    out(f"{'context':>8}{'bf16':>9}{'formula':>9}{'used':>9}{'differ':>8}{'pools':>9}{'host':>9}\n")
    for length in LENGTHS:
        if length > args.longest:
            break
        m = measure(length, TierConfig())
        cells = [m.bf16, m.formula.device, m.used]
        out(
            f"{length // K:>7}K"
            + "".join(f"{c / K:>9.0f}" for c in cells)
            + f"{100 * (m.used / m.formula.device - 1):>7.2f}%"
            + f"{m.allocated / K:>9.0f}{m.host / K:>9.0f}\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
