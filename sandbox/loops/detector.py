"""LoopDetector: D1-D4, D6 and the count of infrastructure errors, over the calls of one episode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sandbox.loops import verdict as limits
from sandbox.loops.fingerprint import call_key, result_key
from sandbox.loops.jitter import SAME, jittered_field
from sandbox.loops.turns import Call, Turn
from sandbox.loops.verdict import LoopAction, LoopVerdict
from sandbox.tool_spec import LoopSpec

_NO_SPEC = LoopSpec()
_SHOWN = 80


@dataclass(slots=True)
class _Streak:
    """Where a detector stands: ``count`` against its limits, ``turns`` at the end it is about."""

    detector: str
    count: int
    warn_at: int
    stop_at: int
    turns: int
    advice: str


@dataclass(slots=True)
class LoopDetector:
    """Feed it every call that ran, in order. ``tools``: what a tool declares about loops.

    Calls of one turn are compared as a sorted set. The history is dropped when the state digest
    changes or a new user message arrives, and by nothing else: it survives a context compaction.
    """

    tools: Mapping[str, LoopSpec] = field(default_factory=dict)
    warn_at: int = limits.WARN_AT
    stop_at: int = limits.STOP_AT
    _turns: list[Turn] = field(default_factory=list, init=False)
    _state: str | None = field(default=None, init=False)
    _num_calls: int = field(default=0, init=False)
    _num_infra: int = field(default=0, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        assert 1 < self.warn_at < self.stop_at, (
            f"warn_at {self.warn_at} must be below stop_at {self.stop_at}"
        )

    def new_message(self) -> None:
        """A new user message arrived: what was done before it is no part of a loop."""
        self._turns.clear()
        self._warned.clear()

    def record(
        self,
        tool: str,
        arguments: dict[str, Any],
        result: Any,
        *,
        error: str | None = None,
        infra: bool = False,
        state: str | None = None,
        time_s: float | None = None,
        turn: int | None = None,
    ) -> LoopVerdict | None:
        """Add one call; the strongest verdict of the detectors, or None.

        ``result``: text or JSON value; ``error``: the error message of a call that failed;
        ``infra``: it failed for its upstream's reasons and counts only as that; ``state``: the
        task's state digest after the call; ``time_s``: any clock; ``turn``: calls with an equal
        number are parallel.
        """
        self._num_calls += 1
        if infra:
            return self._infra_verdict(tool, error if error is not None else str(result))
        self._num_infra = 0
        self._warned.discard("infra")
        if state is not None and state != self._state:
            if self._state is not None:
                self.new_message()
            self._state = state
        spec = self.tools.get(tool, _NO_SPEC)
        said = result if error is None else error
        call = Call(
            number=self._num_calls,
            tool=tool,
            arguments={k: v for k, v in arguments.items() if k not in spec.ignore_args},
            entry=(
                call_key(tool, arguments, spec.ignore_args),
                result_key(said, spec.ignore_result),
            ),
            error=None if error is None else result_key(error),
            result=" ".join(str(said).split())[:_SHOWN],
        )
        self._add(call, turn, time_s)
        return self._judge(call)

    def _add(self, call: Call, turn: int | None, time_s: float | None) -> None:
        last = self._turns[-1] if self._turns else None
        if last is not None and turn is not None and last.turn == turn:
            last.calls.append(call)
            last.settle()
            last.jitter = None
            return
        now = Turn(turn, time_s, [call])
        now.settle()
        before = None if last is None else last.single
        if (
            before is not None
            and before.tool == call.tool
            and before.says_nothing
            and before.entry[1] == call.entry[1]
        ):
            now.jitter = jittered_field(before.arguments, call.arguments)
        self._turns.append(now)

    def _judge(self, call: Call) -> LoopVerdict | None:
        """A stop wins over a warning; among equals the first detector does."""
        found: list[tuple[LoopAction, _Streak]] = []
        running = set()
        for streak in self._streaks():
            if streak.count < streak.warn_at:
                continue
            running.add(streak.detector)
            if streak.count >= streak.stop_at:
                found.append((LoopAction.STOP, streak))
            elif streak.detector not in self._warned:
                found.append((LoopAction.WARN, streak))
        self._warned &= running  # a streak that broke may be warned about again
        if not found:
            return None
        action, streak = next((item for item in found if item[0] is LoopAction.STOP), found[0])
        self._warned.add(streak.detector)
        first = self._turns[-streak.turns].calls[0].number
        return LoopVerdict(
            detector=streak.detector,
            action=action,
            count=streak.count,
            reminder=_reminder(call, streak.count, streak.advice),
            span=(first, call.number),
        )

    def _streaks(self) -> Iterator[_Streak]:
        yield from self._repeat()
        yield from self._cycle()
        yield from self._jitter()
        yield from self._same_error()
        yield from self._stagnation()

    def _equal_tail(self, period: int = 1) -> int:
        """How many turns at the end equal the one ``period`` before."""
        turns = self._turns
        count = 0
        for index in range(len(turns) - 1, period - 1, -1):
            if turns[index].key != turns[index - period].key:
                break
            count += 1
        return count

    def _repeat(self) -> Iterator[_Streak]:
        run = self._equal_tail() + 1
        advice = "answered the same each time"
        polls = self._polls(self._turns[-1])
        if polls is None:
            yield _Streak("repeat", run, self.warn_at, self.stop_at, run, advice)
            return
        min_interval_s, most = polls
        tail = self._turns[-run:]
        short = sum(
            not _waited(before.time_s, now.time_s, min_interval_s) for before, now in pairwise(tail)
        )
        busy = 1 + short
        wait = f"{advice}; wait at least {min_interval_s:g} s between calls"
        if busy >= limits.BUSY_WARN_AT:
            yield _Streak("repeat", busy, limits.BUSY_WARN_AT, limits.BUSY_STOP_AT, run, wait)
        else:
            yield _Streak("repeat", run, most, most + limits.POLL_GRACE, run, advice)

    def _cycle(self) -> Iterator[_Streak]:
        constant = self._equal_tail() + 1
        for period in limits.CYCLE_PERIODS:
            if constant >= period:
                return  # the same thing over and over is D1's
            tail = self._equal_tail(period)
            repetitions = (tail + period) // period
            if repetitions < limits.CYCLE_WARN_AT:
                continue
            if all(self._polls(turn) is not None for turn in self._turns[-period:]):
                return
            yield _Streak(
                "cycle",
                repetitions,
                limits.CYCLE_WARN_AT,
                limits.CYCLE_STOP_AT,
                tail + period,
                f"is part of the same {period} steps, repeated with the same answers",
            )
            return

    def _jitter(self) -> Iterator[_Streak]:
        run, name = 1, SAME
        for turn in reversed(self._turns):
            if turn.jitter is None or turn.single is None:
                break
            if turn.jitter != SAME:
                if name not in (SAME, turn.jitter):
                    break
                name = turn.jitter
            run += 1
        last = self._turns[-1].single
        if name == SAME or last is None:
            return
        is_cursor = name in self.tools.get(last.tool, _NO_SPEC).cursor_args
        warn_at, stop_at = (
            (limits.CURSOR_WARN_AT, limits.CURSOR_STOP_AT)
            if is_cursor
            else (limits.JITTER_WARN_AT, limits.JITTER_STOP_AT)
        )
        yield _Streak(
            "jitter",
            run,
            warn_at,
            stop_at,
            run,
            f"with another {name!r} still answered nothing new",
        )

    def _same_error(self) -> Iterator[_Streak]:
        error = self._turns[-1].error
        if error is None:
            return
        run = 0
        for turn in reversed(self._turns):
            if turn.error != error:
                break
            run += 1
        yield _Streak(
            "same_error", run, self.warn_at, self.stop_at, run, "failed with the same error"
        )

    def _stagnation(self) -> Iterator[_Streak]:
        seen: list[tuple[str, str]] = []
        turns = 0
        for turn in reversed(self._turns):
            turns += 1
            if self._polls(turn) is None:
                seen += (call.entry for call in turn.calls)
            if len(seen) >= limits.STAGNATION_CALLS:
                break
        else:
            return
        recent = seen[: limits.STAGNATION_CALLS]
        if len(set(recent)) <= limits.STAGNATION_DISTINCT:
            count = len(recent)
            yield _Streak("stagnation", count, count, count, turns, "brought nothing new")

    def _polls(self, turn: Turn) -> tuple[float, int] | None:
        """(longest min_interval_s, smallest max) if every call of the turn is a declared poll."""
        polls = [self.tools.get(call.tool, _NO_SPEC).poll for call in turn.calls]
        declared = [poll for poll in polls if poll is not None]
        if len(declared) < len(polls):
            return None
        return max(p.min_interval_s for p in declared), min(p.max for p in declared)

    def _infra_verdict(self, tool: str, message: str) -> LoopVerdict | None:
        self._num_infra += 1
        span = (self._num_calls - self._num_infra + 1, self._num_calls)
        shown = " ".join(message.split())[:_SHOWN]
        if self._num_infra >= limits.INFRA_STOP_AT:
            action = LoopAction.STOP
        elif self._num_infra >= limits.INFRA_WARN_AT and "infra" not in self._warned:
            self._warned.add("infra")
            action = LoopAction.WARN
        else:
            return None
        reminder = (
            f"reminder: {tool} and its service failed {self._num_infra} times in a row "
            f"({shown}); try something else or give the final answer"
        )
        return LoopVerdict("infra", action, self._num_infra, reminder, span, infra=True)


def _waited(before: float | None, now: float | None, interval_s: float) -> bool:
    return before is not None and now is not None and now - before >= interval_s - 1e-6


def _reminder(call: Call, count: int, advice: str) -> str:
    answer = call.result.replace("<|", "<\\|") or "(nothing)"
    return (
        f"reminder: {call.tool} {advice} ({count} times; last result: {answer}); "
        "do something else or give the final answer"
    )
