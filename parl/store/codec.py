"""Trajectory <-> rows, bit for bit. Pure functions; arrays are little-endian blobs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from engine.runtime.types import DrawKey
from infra.db.models import EpisodeRow, ToolCallRow, TurnRow
from parl.trajectory import ToolCallRecord, Trajectory, Turn
from reward_models.episode import Outcome

IDS = np.dtype("<i4")
LOGPROBS = np.dtype("<f4")
MASK = np.dtype("u1")
EXPERTS = np.dtype("<i2")
CODES = np.dtype("u1")


def to_blob(array: np.ndarray, dtype: np.dtype) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def from_blob(blob: bytes, dtype: np.dtype) -> np.ndarray:
    """A writable array in native byte order."""
    return np.frombuffer(blob, dtype).astype(dtype.newbyteorder("="))


def episode_values(trajectory: Trajectory) -> dict[str, Any]:
    """Columns of ``episode`` that finishing sets (state and time excepted)."""
    assert trajectory.outcome is not None, f"{trajectory.episode_id}: no outcome"
    return {
        "outcome": str(trajectory.outcome),
        "correctness": trajectory.correctness,
        "num_tokens": trajectory.num_sampled,
        "num_turns": len(trajectory.turns),
        "num_calls": len(trajectory.calls),
        "budget_units_json": dict(trajectory.budget_units),
        "min_tokens": trajectory.min_tokens,
        "max_tokens": trajectory.max_tokens,
        "prompt_ids": to_blob(trajectory.prompt_ids, IDS),
        "verdict_json": {"reasons": list(trajectory.verdict_reasons)},
        "sandbox_json": dict(trajectory.sandbox),
        "final_text": trajectory.final_text,
        "error": trajectory.error,
        "elapsed_s": trajectory.elapsed_s,
    }


def turn_values(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Rows of ``turn``."""
    return [
        {
            "episode_id": trajectory.episode_id,
            "index": index,
            "weight_version": turn.weight_version,
            "finish": turn.finish,
            "sampled_ids": to_blob(turn.sampled_ids, IDS),
            "logprobs": to_blob(turn.logprobs, LOGPROBS),
            "loss_mask": to_blob(turn.loss_mask, MASK),
            "observation_ids": to_blob(turn.observation_ids, IDS),
            "experts": None if turn.experts is None else to_blob(turn.experts, EXPERTS),
            "experts_shape": None
            if turn.experts is None
            else ",".join(map(str, turn.experts.shape)),
            "experts_start": turn.experts_start,
            **_selection_values(turn.selections),
            "warm_reads": turn.warm_reads,
            "retrieved": turn.retrieved,
            **_code_values(turn.codes),
            "codes_start": turn.codes_start,
            "media_json": list(turn.media_refs),
        }
        for index, turn in enumerate(trajectory.turns)
    ]


def _selection_values(selections: np.ndarray | None) -> dict[str, Any]:
    """Neighbouring queries choose nearly the same tokens, so compression takes most of it away."""
    if selections is None:
        return {"selections": None, "selections_shape": None}
    short = not selections.size or int(selections.max()) <= np.iinfo(np.int16).max
    dtype = np.dtype("<i2" if short else "<i4")
    sizes = ",".join(map(str, selections.shape))
    blob = zlib.compress(to_blob(selections, dtype), level=1)
    return {"selections": blob, "selections_shape": f"{dtype.str}:{sizes}"}


def _selections(row: TurnRow) -> np.ndarray | None:
    if row.selections is None or row.selections_shape is None:
        return None
    kind, _, sizes = row.selections_shape.partition(":")
    flat = from_blob(zlib.decompress(row.selections), np.dtype(kind))
    return flat.astype(np.int32).reshape(tuple(map(int, sizes.split(","))))


def _code_values(codes: np.ndarray | None) -> dict[str, Any]:
    if codes is None:
        return {"codes": None, "codes_shape": None}
    blob = zlib.compress(to_blob(codes, CODES), level=1)
    return {"codes": blob, "codes_shape": ",".join(map(str, codes.shape))}


def _codes(row: TurnRow) -> np.ndarray | None:
    if row.codes is None or row.codes_shape is None:
        return None
    shape = tuple(map(int, row.codes_shape.split(",")))
    return from_blob(zlib.decompress(row.codes), CODES).reshape(shape)


def call_values(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Rows of ``tool_call``."""
    return [
        {
            "episode_id": trajectory.episode_id,
            "turn": call.turn,
            "index": call.index,
            "name_text": call.name_text,
            "arguments_text": call.arguments_text,
            "tool": call.tool,
            "arguments_json": call.arguments,
            "observation": call.observation,
            "error": call.error,
            "repairs_json": list(call.repairs),
            "elapsed_s": call.elapsed_s,
        }
        for call in trajectory.calls
    ]


def to_trajectory(
    row: EpisodeRow, turns: Sequence[TurnRow], calls: Sequence[ToolCallRow]
) -> Trajectory:
    """The finished trajectory; ``turns`` and ``calls`` in order."""
    assert row.outcome is not None and row.prompt_ids is not None, f"{row.id}: not finished"
    return Trajectory(
        episode_id=row.id,
        task_name=row.task_name,
        task_type=row.task_type,
        draw=DrawKey(**row.draw_json),
        prompt_ids=from_blob(row.prompt_ids, IDS),
        turns=[_turn(turn) for turn in turns],
        calls=[_call(call) for call in calls],
        outcome=Outcome(row.outcome),
        correctness=row.correctness,
        final_text=row.final_text,
        error=row.error,
        budget_units=dict(row.budget_units_json),
        min_tokens=row.min_tokens,
        max_tokens=row.max_tokens,
        elapsed_s=row.elapsed_s,
        verdict_reasons=tuple(row.verdict_json.get("reasons", ())),
        sandbox=dict(row.sandbox_json),
    )


def differences(stored: Trajectory, other: Trajectory) -> list[str]:
    """Names of what differs, wall times and error texts excepted (they vary between attempts)."""
    names = ["draw", "outcome", "correctness", "final_text", "verdict_reasons"]
    found = [name for name in names if getattr(stored, name) != getattr(other, name)]
    if not np.array_equal(stored.prompt_ids, other.prompt_ids):
        found.append("prompt_ids")
    if turn_values(stored) != turn_values(other):
        found.append("turns")
    if [_timeless(call) for call in stored.calls] != [_timeless(call) for call in other.calls]:
        found.append("calls")
    return found


def _timeless(call: ToolCallRecord) -> dict[str, Any]:
    return {**asdict(call), "elapsed_s": 0.0}


def _turn(row: TurnRow) -> Turn:
    experts = None
    if row.experts is not None and row.experts_shape is not None:
        shape = tuple(map(int, row.experts_shape.split(",")))
        experts = from_blob(row.experts, EXPERTS).reshape(shape)
    return Turn(
        sampled_ids=from_blob(row.sampled_ids, IDS),
        logprobs=from_blob(row.logprobs, LOGPROBS),
        loss_mask=from_blob(row.loss_mask, MASK),
        observation_ids=from_blob(row.observation_ids, IDS),
        weight_version=row.weight_version,
        finish=row.finish,
        experts=experts,
        experts_start=row.experts_start,
        selections=_selections(row),
        warm_reads=row.warm_reads,
        retrieved=row.retrieved,
        codes=_codes(row),
        codes_start=row.codes_start,
        media_refs=tuple(row.media_json),
    )


def _call(row: ToolCallRow) -> ToolCallRecord:
    return ToolCallRecord(
        turn=row.turn,
        index=row.index,
        name_text=row.name_text,
        arguments_text=row.arguments_text,
        tool=row.tool,
        arguments=row.arguments_json,
        observation=row.observation,
        error=row.error,
        repairs=tuple(row.repairs_json),
        elapsed_s=row.elapsed_s,
    )
