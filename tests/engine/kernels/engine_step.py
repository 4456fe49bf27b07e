"""One decode step of a real LightEngine through the kernels; run in the interpreter's process.

python -m tests.engine.kernels.engine_step gqa|mla    prints one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from engine.config import EngineConfig
from engine.light.engine import LightEngine
from engine.light.runner import BatchOutput, RowBatch
from engine.model.config import ModelConfig
from engine.runtime.types import ContextPolicy, DrawKey, StepRequest
from tests.engine.tiny import HYBRID, MLA, make_weights

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 83, 65)]
"""Block 1 turns warm at 66 tokens: in the decode step, which also reads its codes."""
TILES = {"topk_select": {"TILE": 64}, "code_scan": {"BLOCKS": 1}}
"""Smaller than on a GPU: the interpreter's time goes with the numbers that are sorted."""


def model(kind: Literal["gqa", "mla"]) -> ModelConfig:
    """One layer with experts: the interpreter takes milliseconds for every row of the prompt."""
    hybrid = {"window": 2, "topk": 4, "candidates": 12, "dense_below": 0, "topk_shared": True}
    changes = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "n_routed_experts": 6,
        "topk_group": 1,
    }
    attention = {"kind": kind, "mode": "hybrid", "hot": 2, "hybrid": hybrid}
    base = MLA if kind == "mla" else HYBRID.model_copy(update={"num_key_value_heads": 1})
    return ModelConfig.model_validate(base.model_dump() | changes | {"attention": attention})


@dataclass(frozen=True, slots=True)
class Decoded:
    """logits fp32 [2, V] of both sampled tokens, and what their queries retrieved."""

    logits: np.ndarray
    selections: np.ndarray
    launches: dict[str, int]


def decode(
    kind: Literal["gqa", "mla"], kernels: Literal["torch", "triton"], deterministic: bool = True
) -> Decoded:
    """A prompt and two tokens; launches are those of the second one's batch, a decode step."""
    config = EngineConfig(
        max_context=96,
        num_blocks=8,
        num_warm_blocks=8,
        max_rows=32,
        deterministic=deterministic,
        kernels=kernels,
    )
    weights = make_weights(config=model(kind))
    engine = LightEngine(model(kind), config, fetch_weights=lambda version: weights)
    seen: list[tuple[int, BatchOutput, dict[str, int]]] = []
    runner = engine._scheduler._runner
    run = runner.run

    def watched(batch: RowBatch) -> BatchOutput:
        if kernels == "torch":
            out, launches = run(batch), {}
        else:
            from engine.kernels.launch import counted

            with counted() as counter:
                out = run(batch)
            launches = dict(counter)
        seen.append((len(batch.token_ids), out, launches))
        return out

    runner.run = watched

    async def step() -> Any:
        policy = ContextPolicy(kv="tiered", deterministic=deterministic, draw=DrawKey(1))
        ctx = await engine.init_context(PROMPT, policy)
        return await engine.forward_step(StepRequest(ctx, 2))

    try:
        result = asyncio.run(asyncio.wait_for(step(), timeout=1500))
    finally:
        engine.close()
    rows, _, launches = seen[-1]
    assert rows == 1, f"the last batch has {rows} rows, not one to decode"
    sampled = [out.logits for _, out, _ in seen if len(out.logits)]
    return Decoded(np.concatenate(sampled), result.selections[-2:], launches)


def compare(kind: Literal["gqa", "mla"]) -> dict[str, Any]:
    from engine.kernels.launch import SETTINGS, Setting

    for kernel, sizes in TILES.items():
        old = SETTINGS[kernel]
        SETTINGS[kernel] = Setting(old.num_warps, old.num_stages, {**old.sizes, **sizes})
    torch.set_num_threads(1)
    tiled, fast = decode(kind, "torch"), decode(kind, "torch", deterministic=False)
    ours = decode(kind, "triton", deterministic=False)
    return {
        "largest": float(np.abs(tiled.logits).max()),
        "torch": float(np.abs(fast.logits - tiled.logits).max()),
        "ours": float(np.abs(ours.logits - tiled.logits).max()),
        "same_selections": bool(np.array_equal(ours.selections, tiled.selections)),
        "retrieved": int((ours.selections[-1] >= 0).sum()),
        "launches": ours.launches,
    }


if __name__ == "__main__":
    kind = sys.argv[1]
    assert kind in ("gqa", "mla"), f"{kind}: expected gqa or mla"
    sys.stdout.write(json.dumps(compare(kind)) + "\n")
