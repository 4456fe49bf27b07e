"""The token ledger of one episode in memory: Turn, Trajectory, TrainingSample.

A training sample is the exact concatenation of what the engine saw and sampled; no text is ever
tokenised twice. Shapes: T tokens of the whole context, n sampled in a turn, m observed after it,
L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.runtime.types import DrawKey
from reward_models.episode import UNSCORED, Episode, Outcome
from sandbox.calls.types import num_policy_repairs
from sandbox.session import Stop

OUTCOME_OF_STOP: dict[Stop, Outcome] = {
    Stop.LOOP: Outcome.LOOP,
    Stop.ILLEGAL_CALL: Outcome.ILLEGAL_CALL,
    Stop.PARSE_FAILURE: Outcome.PARSE_FAILURE,
    Stop.UNPARSED_RESULT: Outcome.PARSE_FAILURE,
    Stop.ENV_ERROR: Outcome.ENV_ERROR,
    Stop.INFRA_ERROR: Outcome.INFRA_ERROR,
}

PADDING_RUN = 16
"""Tokens in a row that no turn has a reason to say twice."""


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """One call as written, as understood and as answered."""

    turn: int
    index: int
    name_text: str
    arguments_text: str
    tool: str | None
    arguments: dict[str, Any] | None
    observation: str
    error: str | None
    repairs: tuple[str, ...]
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens sampled in one engine step and the tokens the world answered with.

    sampled_ids int32 [n], logprobs float32 [n], loss_mask uint8 [n] (0 = sampled but not trained
    on), observation_ids int32 [m]; experts int16 [p, L, K] for positions
    [experts_start, experts_start + p), and for the same positions selections int32
    [p, M, G, P | 1, S] in hybrid attention, with what it read, and codes uint8 [w, bytes] of blocks
    [codes_start, codes_start + w), which turned warm (StepResult of the engine).
    """

    sampled_ids: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    observation_ids: np.ndarray
    weight_version: int
    finish: str
    experts: np.ndarray | None = None
    experts_start: int = 0
    selections: np.ndarray | None = None
    warm_reads: int = 0
    retrieved: int = 0
    codes: np.ndarray | None = None
    codes_start: int = 1
    media_refs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What the learner gets: arrays over the T tokens of a context, no text.

    token_ids int32 [T]; loss_mask uint8 [T] (1 where the token was sampled and is trained on);
    logprobs float32 [T] (engine's, 0 elsewhere); experts int16 [T-1, L, K] or None: routed experts
    of input positions 0..T-2; selections int32 [T-1, M, G, P | 1, S] or None; codes uint8
    [W, bytes] of blocks 1..W or None. ``key`` = (round, task, sample) orders batches.
    """

    key: tuple[int, int, int]
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    experts: np.ndarray | None
    weight_version: int
    selections: np.ndarray | None = None
    codes: np.ndarray | None = None


@dataclass(slots=True)
class Trajectory:
    """One episode's tokens, calls and end. Grows turn by turn in parl.rollout."""

    episode_id: str
    task_name: str
    task_type: str
    draw: DrawKey
    prompt_ids: np.ndarray
    turns: list[Turn] = field(default_factory=list)
    calls: list[ToolCallRecord] = field(default_factory=list)
    outcome: Outcome | None = None
    correctness: float | None = None
    final_text: str = ""
    error: str | None = None
    failure: str | None = None
    """Of an infra_error: the kind (parl.rollout.failures). The ledger has it as an event."""
    budget_units: dict[str, float] = field(default_factory=dict)
    min_tokens: int | None = None
    max_tokens: int | None = None
    elapsed_s: float = 0.0
    verdict_reasons: tuple[str, ...] = ()
    sandbox: dict[str, Any] = field(default_factory=dict[str, Any])
    """Limits that the episode's box enforced (sandbox.backends.enforced)."""

    @property
    def group_key(self) -> str:
        """Episodes of one prompt in one round share it."""
        return f"{self.draw.round}/{self.draw.task}"

    @property
    def num_sampled(self) -> int:
        """T(y): tokens the policy generated."""
        return sum(len(turn.sampled_ids) for turn in self.turns)

    def token_ids(self) -> np.ndarray:
        """int32 [T]: prompt, then sampled and observed tokens of each turn."""
        parts = [self.prompt_ids]
        for turn in self.turns:
            parts += [turn.sampled_ids, turn.observation_ids]
        return np.concatenate(parts).astype(np.int32)

    def check(self) -> None:
        """Assert our own invariants: lengths agree, expert reports are gapless, outcome is set."""
        position = len(self.prompt_ids)
        reported, coded = 0, 1
        for index, turn in enumerate(self.turns):
            n = len(turn.sampled_ids)
            assert len(turn.logprobs) == n == len(turn.loss_mask), (
                f"{self.episode_id} turn {index}: {n} ids, {len(turn.logprobs)} logprobs, "
                f"{len(turn.loss_mask)} mask bits"
            )
            if turn.experts is not None:
                assert turn.experts_start == reported, (
                    f"{self.episode_id} turn {index}: experts start at {turn.experts_start}, "
                    f"expected {reported}"
                )
                reported += len(turn.experts)
            if turn.selections is not None and turn.experts is not None:
                assert len(turn.selections) == len(turn.experts), (
                    f"{self.episode_id} turn {index}: selections cover {len(turn.selections)} "
                    f"positions, experts {len(turn.experts)}"
                )
            if turn.codes is not None:
                assert turn.codes_start == coded, (
                    f"{self.episode_id} turn {index}: codes start at block {turn.codes_start}, "
                    f"expected {coded}"
                )
                coded += len(turn.codes)
            position += n
            if turn.experts is not None:
                assert reported == position - 1, (
                    f"{self.episode_id} turn {index}: experts cover {reported} positions, "
                    f"expected {position - 1}"
                )
            position += len(turn.observation_ids)
        assert self.outcome is not None, f"{self.episode_id}: no outcome"
        assert (self.correctness is None) == (self.outcome in UNSCORED), (
            f"{self.episode_id}: outcome {self.outcome} with correctness {self.correctness}"
        )

    def to_episode(self) -> Episode:
        """The reward's view: counts, text and verdict."""
        assert self.outcome is not None, f"{self.episode_id}: not finished"
        return Episode(
            episode_id=self.episode_id,
            task_name=self.task_name,
            task_type=self.task_type,
            outcome=self.outcome,
            correctness=self.correctness,
            num_tokens=self.num_sampled,
            num_turns=len(self.turns),
            num_calls=len(self.calls),
            num_bad_calls=sum(call.error is not None for call in self.calls),
            num_repairs=sum(num_policy_repairs(call.repairs) for call in self.calls),
            final_text=self.final_text,
            budget_units=dict(self.budget_units),
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            group_key=self.group_key,
            padding=padding_share([turn.sampled_ids for turn in self.turns]),
        )

    def to_training_sample(self) -> TrainingSample:
        """Exact concatenation; tokens after the last sampled one are cut (nothing predicts from
        them)."""
        ids = [self.prompt_ids.astype(np.int32)]
        mask = [np.zeros(len(self.prompt_ids), np.uint8)]
        logprobs = [np.zeros(len(self.prompt_ids), np.float32)]
        for index, turn in enumerate(self.turns):
            ids.append(turn.sampled_ids.astype(np.int32))
            mask.append(turn.loss_mask.astype(np.uint8))
            logprobs.append(turn.logprobs.astype(np.float32))
            if index < len(self.turns) - 1:
                m = len(turn.observation_ids)
                ids.append(turn.observation_ids.astype(np.int32))
                mask.append(np.zeros(m, np.uint8))
                logprobs.append(np.zeros(m, np.float32))
        token_ids = np.concatenate(ids)
        num_inputs = len(token_ids) - 1
        return TrainingSample(
            key=(self.draw.round, self.draw.task, self.draw.sample),
            token_ids=token_ids,
            loss_mask=np.concatenate(mask),
            logprobs=np.concatenate(logprobs),
            experts=_joined([turn.experts for turn in self.turns], num_inputs),
            weight_version=min((turn.weight_version for turn in self.turns), default=-1),
            selections=_joined([turn.selections for turn in self.turns], num_inputs),
            codes=_joined([turn.codes for turn in self.turns]),
        )


def _joined(reports: list[np.ndarray | None], length: int | None = None) -> np.ndarray | None:
    """The first ``length`` entries of what the turns reported; None where one did not."""
    known = [report for report in reports if report is not None]
    return np.concatenate(known)[:length] if known and len(known) == len(reports) else None


def padding_share(sampled: Sequence[np.ndarray], size: int = PADDING_RUN) -> float:
    """Share of all tokens that lie in a run of ``size`` which its turn has said before; 0 for none.

    Only within a turn: a tool may have to be asked in the same words again.
    """
    repeated = 0
    for ids in sampled:
        seen: set[bytes] = set()
        marked = np.zeros(len(ids), bool)
        for start in range(len(ids) - size + 1):
            run = ids[start : start + size].tobytes()
            if run in seen:
                marked[start : start + size] = True
            seen.add(run)
        repeated += int(marked.sum())
    total = sum(len(ids) for ids in sampled)
    return repeated / total if total else 0.0
