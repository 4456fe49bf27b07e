"""``parl rl show``: everything the ledger knows about one episode, token by token, as text.

Nothing is looked up elsewhere; a tokenizer only adds the text beside the ids.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from infra.db.engine import Ledger
from infra.db.models import (
    EpisodeRow,
    EventRow,
    RewardPartRow,
    RoundRow,
    TaskRow,
    ToolCallRow,
    TurnRow,
)
from infra.errors import LedgerError

TokenText = Callable[[Sequence[int]], str]
"""Text of token ids; bytes that are no text may come as lone surrogates."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """The rows of one episode."""

    episode: EpisodeRow
    round: RoundRow | None
    turns: Sequence[TurnRow]
    calls: Sequence[ToolCallRow]
    parts: Sequence[RewardPartRow]
    task: TaskRow | None
    events: Sequence[EventRow]
    """What happened to it beside its turns: further attempts and why."""


def read_episode(ledger: Ledger, run_id: str, reference: str) -> EpisodeRecord:
    """``reference``: an episode id, or its end ("train/00003/00001/002" or "3/1/2").

    LedgerError names the nearest known ids.
    """
    with ledger.session() as session:
        episode = _find(session, run_id, reference)
        where = {"run_id": episode.run_id, "phase": episode.phase, "index": episode.round_index}
        turns = select(TurnRow).where(TurnRow.episode_id == episode.id).order_by(TurnRow.index)
        calls = select(ToolCallRow).where(ToolCallRow.episode_id == episode.id)
        parts = select(RewardPartRow).where(RewardPartRow.episode_id == episode.id)
        events = select(EventRow).where(
            EventRow.run_id == episode.run_id, EventRow.key == episode.id
        )
        return EpisodeRecord(
            episode=episode,
            round=session.get(RoundRow, where),
            turns=session.scalars(turns).all(),
            calls=session.scalars(calls.order_by(ToolCallRow.turn, ToolCallRow.index)).all(),
            parts=session.scalars(parts.order_by(RewardPartRow.name)).all(),
            task=None if episode.task_id is None else session.get(TaskRow, episode.task_id),
            events=session.scalars(events.order_by(EventRow.id)).all(),
        )


def _find(session: Session, run_id: str, reference: str) -> EpisodeRow:
    for candidate in _candidates(run_id, reference):
        found = session.get(EpisodeRow, candidate)
        if found is not None:
            return found
    known = session.scalars(
        select(EpisodeRow.id).where(EpisodeRow.run_id == run_id).order_by(EpisodeRow.id)
    ).all()
    near = difflib.get_close_matches(f"{run_id}/{reference}", known, n=1, cutoff=0.0)
    hint = f"the nearest of its {len(known)} is {near[0]}" if near else "it has no episodes yet"
    raise LedgerError(f"run {run_id} has no episode {reference!r}; {hint}")


def _candidates(run_id: str, reference: str) -> Iterator[str]:
    yield reference
    yield f"{run_id}/{reference}"
    parts = reference.split("/")
    numbers = parts[-3:]
    if len(numbers) == 3 and all(part.isdecimal() for part in numbers):
        phase = "/".join(parts[:-3]).removeprefix(f"{run_id}/") or "train"
        round_index, task, sample = map(int, numbers)
        yield f"{run_id}/{phase}/{round_index:05d}/{task:05d}/{sample:03d}"


def episode_text(record: EpisodeRecord, text_of: TokenText) -> str:
    """The whole record: header, prompt, turns with tokens and calls, reward."""
    lines = [*_header(record), "", *_prompt(record.episode, text_of)]
    for turn in record.turns:
        lines += ["", *_turn(turn, text_of)]
        lines += [line for call in record.calls if call.turn == turn.index for line in _call(call)]
    return "\n".join([*lines, "", *_reward(record)])


def _header(record: EpisodeRecord) -> list[str]:
    row = record.episode
    stage = row.stage
    if stage is None and record.round is not None:
        stage = record.round.stage
    versions = sorted({turn.weight_version for turn in record.turns})
    lines = [
        f"episode   {row.id}",
        f"task      {row.task_name} ({row.task_type}) id {row.task_id or '-'}",
        f"state     {row.state}, outcome {row.outcome or '-'}, attempt {row.attempt}, "
        f"worker {row.worker or '-'}, {row.elapsed_s:.3f} s",
        f"round     {row.phase} {row.round_index}, task {row.task_index}, sample {row.sample}, "
        f"stage {stage}",
        f"weights   version {', '.join(map(str, versions)) or row.weight_version}",
        f"draws     {json.dumps(row.draw_json)}",
        f"limits    budget {row.budget}, units {json.dumps(row.budget_units_json)}, "
        f"min tokens {row.min_tokens}, max tokens {row.max_tokens}",
        f"sandbox   {_sandbox(row.sandbox_json)}",
        f"counts    {row.num_tokens} sampled tokens, {row.num_turns} turns, {row.num_calls} calls",
    ]
    if row.drop_reason:
        lines.append(f"dropped   {row.drop_reason}")
    if row.error:
        lines.append(f"error     {row.error}")
    if record.task is not None:
        lines.append(f"instance  {json.dumps(record.task.spec_json, ensure_ascii=False)}")
    lines += [f"event     {event.kind} {json.dumps(event.data_json)}" for event in record.events]
    return lines


def _prompt(row: EpisodeRow, text_of: TokenText) -> list[str]:
    if row.prompt_ids is None:
        return ["prompt    (not rendered yet)"]
    ids = np.frombuffer(row.prompt_ids, "<i4")
    return [f"prompt    {len(ids)} tokens", *_ids(ids, text_of)]


def _turn(turn: TurnRow, text_of: TokenText) -> list[str]:
    """One line a sampled token (id, mask, logprob, text), then what the world answered."""
    ids = np.frombuffer(turn.sampled_ids, "<i4")
    logprobs = np.frombuffer(turn.logprobs, "<f4")
    mask = np.frombuffer(turn.loss_mask, "u1")
    experts = (
        "none" if turn.experts is None else f"[{turn.experts_shape}] from {turn.experts_start}"
    )
    read = (
        f", read {turn.warm_reads} coded tokens, retrieved {turn.retrieved}"
        if turn.warm_reads or turn.retrieved
        else ""
    )
    lines = [
        f"turn {turn.index}    {len(ids)} sampled, finish {turn.finish}, weights "
        f"{turn.weight_version}, experts {experts}{read}",
        "          id  mask   logprob  text",
    ]
    for token, bit, logprob in zip(ids.tolist(), mask.tolist(), logprobs.tolist(), strict=True):
        lines.append(f"     {token:>7}  {bit:>4}  {logprob:>8.4f}  {_quote(text_of([token]))}")
    observed = np.frombuffer(turn.observation_ids, "<i4")
    if len(observed):
        lines += [f"  observed {len(observed)} tokens (mask 0)", *_ids(observed, text_of)]
    return lines


def _ids(ids: np.ndarray, text_of: TokenText) -> list[str]:
    tokens = ids.tolist()
    return [
        f"  ids     {' '.join(map(str, tokens))}",
        f"  text    {_quote(text_of(tokens))}",
    ]


def _call(call: ToolCallRow) -> list[str]:
    understood: Any = call.tool or "not understood"
    if call.arguments_json is not None:
        understood = f"{understood}({json.dumps(call.arguments_json, ensure_ascii=False)})"
    lines = [
        f"  call {call.turn}.{call.index} wrote {_quote(call.name_text)} "
        f"{_quote(call.arguments_text)}",
        f"           ran {understood} in {1000 * call.elapsed_s:.1f} ms",
        f"           observed {_quote(call.observation)}",
    ]
    if call.repairs_json:
        lines.append(f"           repairs {', '.join(map(str, call.repairs_json))}")
    if call.error:
        lines.append(f"           error {call.error}")
    return lines


def _reward(record: EpisodeRecord) -> list[str]:
    row = record.episode
    lines = [
        f"answer    {_quote(row.final_text)}",
        f"verdict   correctness {row.correctness}  {json.dumps(row.verdict_json)}",
        f"reward    {row.reward}  formula {row.formula_version or '-'}",
    ]
    lines += [f"  part    {part.name} = {part.value}" for part in record.parts]
    lines += [f"  reason  {reason}" for reason in row.reward_reasons_json]
    return lines


def _quote(text: str) -> str:
    """One printable line whatever the policy wrote; bytes that are no text become escapes."""
    return json.dumps(text.encode("utf-8", "backslashreplace").decode(), ensure_ascii=False)


def _sandbox(limits: dict[str, Any]) -> str:
    """``level A, memory_bytes 268435456, ...``; what is not enforced is said to be so."""
    if not limits:
        return "no limits on record"
    held = [f"{name} {value}" for name, value in limits.items() if value not in (None, [])]
    missing = [name for name, value in limits.items() if value is None]
    return ", ".join(held) + (f"; not enforced: {', '.join(missing)}" if missing else "")
