"""Random draws that depend on names, not on call order: Philox4x32-10 (Salmon et al., SC 2011).

u = philox(key = run seed, counter = (position, sample | stream << 16, task, round)). The generator
is counter-based, so a batch of draws is one vectorised evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.runtime.types import DrawKey

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_BITS = {"run_seed": 64, "round": 32, "task": 32, "sample": 16, "stream": 16}


def philox4x32(counter: np.ndarray, key: np.ndarray, rounds: int = 10) -> np.ndarray:
    """counter uint32 [N, 4], key uint32 [N, 2] -> uint32 [N, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for index in range(rounds):
        r0 = (k0 + np.uint64((_W0 * index) & 0xFFFFFFFF)) & _LOW
        r1 = (k1 + np.uint64((_W1 * index) & 0xFFFFFFFF)) & _LOW
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ r0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ r1, p0 & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def check_key(draw: DrawKey) -> None:
    """ValueError when a field does not fit its word."""
    for name, bits in _BITS.items():
        value = getattr(draw, name)
        if not 0 <= value < 1 << bits:
            raise ValueError(
                f"draw key {name}={value} does not fit {bits} bits, expected 0 or more"
            )


def uniforms(draws: Sequence[DrawKey], positions: Sequence[int]) -> np.ndarray:
    """float64 [N] in (0, 1), 53 bits each: u = (bits + 0.5) / 2**53."""
    counter = np.array(
        [
            (position, draw.sample | draw.stream << 16, draw.task, draw.round)
            for draw, position in zip(draws, positions, strict=True)
        ],
        dtype=np.uint32,
    ).reshape(-1, 4)
    key = np.array(
        [(draw.run_seed & 0xFFFFFFFF, draw.run_seed >> 32) for draw in draws], dtype=np.uint32
    ).reshape(-1, 2)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return (bits.astype(np.float64) + 0.5) / float(1 << 53)
