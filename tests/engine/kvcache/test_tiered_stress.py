"""Eight threads on one cache against the same calls one after the other, freed blocks NaN."""

from __future__ import annotations

import hashlib
import random
import threading
import time

import pytest
import torch

from engine.kvcache.config import TierConfig
from engine.kvcache.tiered import TieredKV
from tests.engine.kvcache.tiers_oracle import LAYERS, make_cache, read_block, rows

CONFIG = TierConfig(hot=40, warm=96, debug_nan=True)
THREADS = 8
ROOT = "root"
ROOT_LENGTH = 230


def append(kv: TieredKV, ctx: str, seed: int, start: int, count: int) -> int:
    positions = list(range(start, start + count))
    with kv.step([(ctx, positions)]) as running:
        for layer in range(LAYERS):
            kv.write(layer, running, *rows([seed] * count, positions, layer))
    return start + count


def digest(kv: TieredKV, ctx: str) -> str:
    """Everything a query could read now, and the counts."""
    summary = kv.summary(ctx)
    found = hashlib.sha256(
        f"{summary.num_tokens} {summary.num_hot} {summary.num_warm} {summary.num_cold}".encode()
    )
    with kv.step([(ctx, [])]) as reading:
        view = reading.views[0]
        for layer in range(LAYERS):
            read = kv.read(layer, view)
            for block in [*read.full_blocks.tolist(), *read.warm_blocks.tolist()]:
                pair = read_block(read, block)
                assert pair is not None
                for tensor in pair:
                    assert torch.isfinite(tensor).all(), f"{ctx} reads a freed block {block}"
                    found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def episode(kv: TieredKV, name: str, seed: int) -> list[str]:
    """A random script on a fork of the root; its digests."""
    rng = random.Random(seed)
    kv.fork(ROOT, name)
    length, seen = ROOT_LENGTH, []
    for turn in range(8):
        length = append(kv, name, seed, length, rng.choice([1, 2, 33]))
        start = rng.randrange(length)
        end = min(length, start + rng.choice([1, 70, 300]))
        action = rng.choice(["cold", "rewarm", "fork", "refill"])
        if action == "cold":
            kv.evict(name, start, end, "cold")
        elif action == "rewarm":
            kv.rewarm(name, start, end)
        elif action == "fork":
            child = f"{name}.{turn}"
            kv.fork(name, child)
            append(kv, child, seed + 1, length, 40)
            kv.rewarm(child, 0, length)
            seen.append(digest(kv, child))
            kv.release(child)
        else:
            kv.evict(name, start, min(end, start + 32))
            missing = kv.missing(name).tolist()
            with kv.step([(name, missing)]) as running:
                for layer in range(LAYERS):
                    kv.write(layer, running, *rows([seed] * len(missing), missing, layer))
        seen.append(digest(kv, name))
    kv.release(name)
    return seen


def new_cache() -> TieredKV:
    kv = make_cache(CONFIG, num_full=400, num_warm=600)
    kv.open(ROOT)
    append(kv, ROOT, 1, 0, ROOT_LENGTH)
    return kv


@pytest.mark.parametrize(
    "seconds", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_threads_change_nothing(seconds: int):
    """Each thread repeats its own script; every digest equals the serial one; nothing leaks."""
    kv = new_cache()
    golden = [episode(kv, f"g{i}", 100 + i) for i in range(THREADS)]
    kv.close()
    kv = new_cache()
    deadline = time.monotonic() + seconds
    failures: list[str] = []
    rounds = [0] * THREADS

    def work(index: int) -> None:
        try:
            while time.monotonic() < deadline or not rounds[index]:
                name = f"t{index}.{rounds[index]}"
                if episode(kv, name, 100 + index) != golden[index]:
                    failures.append(f"{name} differs from the serial run")
                    return
                rounds[index] += 1
        except BaseException as error:
            failures.append(f"thread {index}: {error!r}")
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert min(rounds) > 0
    kv.release(ROOT)
    kv.settle()
    assert kv.used_bytes == 0 and len(kv.store) == 0
    kv.close()
