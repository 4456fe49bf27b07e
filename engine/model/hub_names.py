"""Our tensors under the names of the released K2 checkpoints, and back (facts 8.1).

In memory gate and up are one matrix and a layer's experts one stack, which is what is fast; on the
hub each expert has three matrices of its own. Attention is GQA here and MLA there, so its names are
those of the projections: q_proj, k_proj, v_proj, o_proj.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from engine.errors import WeightsError

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = re.compile(r"(.*\.(?:mlp|shared_experts))\.(gate|up)_proj\.weight")


def to_hub(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a PolicyModel's state_dict -> hub names; views where possible."""
    hub: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if name == "lm_head":
            hub["lm_head.weight"] = array
            continue
        stem = f"model.{name}"
        if name.endswith(".experts_gate_up_proj"):
            prefix = stem.removesuffix("_gate_up_proj")
            for expert, matrix in enumerate(array):
                gate, up = np.split(matrix, 2)
                hub[f"{prefix}.{expert}.gate_proj.weight"] = gate
                hub[f"{prefix}.{expert}.up_proj.weight"] = up
        elif name.endswith(".experts_down_proj"):
            prefix = stem.removesuffix("_down_proj")
            for expert, matrix in enumerate(array):
                hub[f"{prefix}.{expert}.down_proj.weight"] = matrix
        elif name.endswith(".gate_up_proj"):
            prefix = stem.removesuffix(".gate_up_proj")
            gate, up = np.split(array, 2)
            hub[f"{prefix}.gate_proj.weight"], hub[f"{prefix}.up_proj.weight"] = gate, up
        else:
            own = name.endswith((".weight", ".e_score_correction_bias"))
            hub[stem if own else f"{stem}.weight"] = array
    return hub


def from_hub(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reverse of ``to_hub``; WeightsError when an expert or half of a pair is missing."""
    ours: dict[str, np.ndarray] = {}
    stacks: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors.items():
        short = name.removeprefix("model.")
        if match := _EXPERT.fullmatch(short):
            stacks.setdefault((match[1], match[3]), {})[int(match[2])] = array
        elif match := _FUSED.fullmatch(short):
            pairs.setdefault(match[1], {})[match[2]] = array
        elif short.endswith(("norm.weight", "layernorm.weight", "gate.weight", "_bias")):
            ours[short] = array
        else:
            ours[short.removesuffix(".weight")] = array
    for prefix, pair in pairs.items():
        if set(pair) != {"gate", "up"}:
            raise WeightsError(f"{prefix} has only {sorted(pair)}; expected gate_proj and up_proj")
        ours[f"{prefix}.gate_up_proj"] = np.concatenate([pair["gate"], pair["up"]])
    for prefix in sorted({prefix for prefix, _ in stacks}):
        gate, up, down = (_stack(stacks, prefix, kind) for kind in ("gate", "up", "down"))
        if not len(gate) == len(up) == len(down):
            raise WeightsError(
                f"{prefix} has {len(gate)} gate, {len(up)} up and {len(down)} down matrices; "
                "expected one of each for every expert"
            )
        ours[f"{prefix}_gate_up_proj"] = np.concatenate([gate, up], axis=1)
        ours[f"{prefix}_down_proj"] = down
    return ours


def _stack(
    stacks: Mapping[tuple[str, str], Mapping[int, np.ndarray]], prefix: str, kind: str
) -> np.ndarray:
    """[E, ...] in the order of the experts' numbers."""
    matrices = stacks.get((prefix, kind), {})
    missing = sorted(set(range(max(matrices, default=0) + 1)) - set(matrices))
    if missing:
        raise WeightsError(f"{prefix}: {kind}_proj of expert {missing[0]} is missing")
    return np.stack([matrices[expert] for expert in range(len(matrices))])
