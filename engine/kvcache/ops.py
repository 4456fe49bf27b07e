"""How the device tiers are written: torch, or whatever an engine puts in its place."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.kvcache.quantise import Profile, WarmKeys, WarmValues, quantise_keys, quantise_values


class CacheOps(Protocol):
    def append(
        self, keys: Tensor, values: Tensor | None, rows: Tensor, k: Tensor, v: Tensor | None
    ) -> None:
        """Put k [N, G, D], v [N, G, V] into pools keys [S, G, 32, D], values [S, G, 32, V] at flat
        rows int64 [N * G], see FullPool.rows."""
        ...

    def quantise(
        self, k: Tensor, v: Tensor | None, profile: Profile
    ) -> tuple[WarmKeys, WarmValues | None]:
        """k [n, G, 32, D], v [n, G, 32, V] -> their codes. QuantiseError where there are none."""
        ...


class TorchCacheOps:
    def append(
        self, keys: Tensor, values: Tensor | None, rows: Tensor, k: Tensor, v: Tensor | None
    ) -> None:
        _put(keys, rows, k)
        if values is not None:
            assert v is not None, "only latent attention has no values"
            _put(values, rows, v)

    def quantise(
        self, k: Tensor, v: Tensor | None, profile: Profile
    ) -> tuple[WarmKeys, WarmValues | None]:
        return quantise_keys(k, profile), None if v is None else quantise_values(v, profile)


def _put(pool: Tensor, rows: Tensor, x: Tensor) -> None:
    pool.view(-1, pool.shape[3]).index_copy_(0, rows, x.reshape(-1, x.shape[2]).to(pool.dtype))
