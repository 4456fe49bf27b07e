"""The kernels in the places an engine has for them: matrix products of rows, and cache writes."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.kv_append import kv_append
from engine.kernels.kv_quantise_block import kv_quantise_block
from engine.kernels.moe_grouped_gemm import moe_grouped_gemm
from engine.kernels.moe_route import moe_route
from engine.kvcache.quantise import BLOCK, Profile, WarmKeys, WarmValues
from engine.model.ops import RouteRule, RowOps


class KernelOps:
    """RowOps whose experts are kernels; plain products stay those of ``base``."""

    def __init__(self, base: RowOps) -> None:
        self._base = base
        self.row_multiple = base.row_multiple

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._base.linear(x, weight)

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._base.heads(x, weight)

    def route(self, logits: Tensor, bias: Tensor, rule: RouteRule) -> tuple[Tensor, Tensor]:
        return moe_route(
            logits,
            bias,
            rule.top_k,
            rule.groups,
            rule.top_groups,
            rule.normalise,
            rule.scale,
            "triton",
        )

    def experts(
        self, x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        return moe_grouped_gemm(x, used, weights, gate_up, down, "triton")


class KernelCacheOps:
    """engine.kvcache.ops.CacheOps."""

    def append(
        self, keys: Tensor, values: Tensor | None, rows: Tensor, k: Tensor, v: Tensor | None
    ) -> None:
        groups = keys.shape[1]
        first = rows.view(-1, groups)[:, 0]
        # (slot * G + 0) * 32 + offset -> slot * 32 + offset
        slots = first // (groups * BLOCK) * BLOCK + first % BLOCK
        kv_append(keys, values, slots, k, None if values is None else v, "triton")

    def quantise(
        self, k: Tensor, v: Tensor | None, profile: Profile
    ) -> tuple[WarmKeys, WarmValues | None]:
        return kv_quantise_block(k, v, profile, "triton")
