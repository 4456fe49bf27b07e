"""The session's state machine, on real tools in this process."""

import asyncio
from dataclasses import replace

import pytest

from sandbox.catalog.lookup_calc.family import LookupCalc
from sandbox.errors import BackendUnavailable, SandboxError, TaskError
from sandbox.fakes import InProcessSession
from sandbox.session import Observation, RawCall, Session, SessionState, Stop
from sandbox.task import ToolBundle
from sandbox.tool_session import to_verdict

FAMILY = LookupCalc()
ADD = FAMILY.instance(0, 0, "train", "add")
KEY = ADD.instruction.split()[1]
GOOD = RawCall("functions.lookup:0", f'{{"key":"{KEY}"}}')
BAD = RawCall("functions.lookup:0", "{")
UNKNOWN = RawCall("functions.look:0", "{}")


async def play(*calls: RawCall, **changes: object) -> tuple[list[Observation], InProcessSession]:
    """Start a session, make the calls until one stops it."""
    session = InProcessSession(replace(ADD, **changes), FAMILY.bundle)
    assert (await session.start()).text == ADD.instruction
    seen = []
    for call in calls:
        seen.append(await session.call(call))
        if seen[-1].stop is not None:
            break
    return seen, session


@pytest.mark.parametrize("task_type", FAMILY.task_types)
def test_the_oracle_passes_and_a_wrong_answer_does_not(task_type: str):
    """start, calls, verify, close for a right and a wrong final text."""

    async def go(final: str | None) -> float | None:
        spec = FAMILY.instance(3, 5, "train", task_type)
        oracle = FAMILY.oracle(spec)
        session = InProcessSession(spec, FAMILY.bundle)
        assert isinstance(session, Session) and session.state is SessionState.NEW
        await session.start()
        for calls in oracle.rounds:
            for call in calls:
                observation = await session.call(call)
                assert observation.error is None and observation.tool in ("lookup", "calc")
        verdict = await session.verify(oracle.final_text if final is None else final)
        assert session.state is SessionState.VERIFIED
        await session.close()
        assert session.state is SessionState.CLOSED
        assert verdict.passed == (verdict.correctness == 1.0)
        return verdict.correctness

    assert asyncio.run(go(None)) == 1.0
    assert asyncio.run(go("77")) == 0.0
    assert asyncio.run(go("the sum")) == 0.0


@pytest.mark.parametrize(
    ("calls", "stop", "at"),
    [
        ([UNKNOWN, UNKNOWN], Stop.ILLEGAL_CALL, 2),
        ([UNKNOWN, GOOD, UNKNOWN], Stop.ILLEGAL_CALL, 3),
        ([BAD] * 4, Stop.PARSE_FAILURE, 4),
        ([BAD, GOOD, RawCall("lookup", "{}"), RawCall("", ""), BAD], Stop.PARSE_FAILURE, 5),
        ([GOOD] * 5, Stop.LOOP, 5),
        ([BAD] * 3 + [GOOD] * 2 + [UNKNOWN], None, 6),
    ],
)
def test_violations_stop_the_episode_and_raise_nothing(
    calls: list[RawCall], stop: Stop | None, at: int
):
    """Second unknown tool, fourth malformed call, fifth equal call."""
    seen, session = asyncio.run(play(*calls))
    assert len(seen) == at and seen[-1].stop is stop
    assert session.state is (SessionState.STOPPED if stop else SessionState.RUNNING)


def test_reminders_are_given_once():
    """The second malformed call and the third equal call carry one line."""
    seen, _ = asyncio.run(play(BAD, BAD, BAD))
    assert ["reminder" in observation.text for observation in seen] == [False, True, False]
    seen, _ = asyncio.run(play(GOOD, GOOD, GOOD, GOOD))
    assert [observation.loop for observation in seen] == [None, None, "repeat:warn", None]


def test_a_forbidden_tool_counts_as_illegal():
    """It exists, but the task does not allow it."""
    calc = RawCall("functions.calc:0", '{"expression":"1+1"}')
    seen, _ = asyncio.run(play(calc, calc, forbidden_tools=("calc",)))
    assert [observation.error for observation in seen] == ["forbidden_tool"] * 2
    assert seen[-1].stop is Stop.ILLEGAL_CALL


def test_a_tools_own_refusal_is_an_observation():
    """The model reads why, and the episode goes on."""
    missing = RawCall("functions.lookup:0", '{"key":"nope"}')
    seen, session = asyncio.run(play(missing))
    assert (seen[0].text, seen[0].error) == ("tool_error: no such key", "tool_error")
    assert session.state is SessionState.RUNNING


def test_a_stopped_session_can_still_be_verified():
    """Correctness is measured before any budget or violation effect."""

    async def go() -> None:
        seen, session = await play(UNKNOWN, UNKNOWN)
        assert seen[-1].stop is Stop.ILLEGAL_CALL
        with pytest.raises(SandboxError, match="call in state 'stopped'; allowed in 'running'"):
            await session.call(GOOD)
        assert (await session.verify(FAMILY.oracle(ADD).final_text)).correctness == 1.0

    asyncio.run(go())


def test_calls_out_of_order_raise():
    """call before start, start twice, verify twice, anything after close; close is idempotent."""

    async def go() -> None:
        session = InProcessSession(ADD, FAMILY.bundle)
        with pytest.raises(SandboxError, match="call in state 'new'"):
            await session.call(GOOD)
        await session.start()
        with pytest.raises(SandboxError, match="start in state 'running'"):
            await session.start()
        await session.verify("1")
        with pytest.raises(SandboxError, match="verify in state 'verified'"):
            await session.verify("1")
        await session.close()
        await session.close()
        with pytest.raises(SandboxError, match="call in state 'closed'"):
            await session.call(GOOD)

    asyncio.run(go())


def test_a_world_that_cannot_be_set_up_stops_with_env_error():
    """setup() raising is nobody's reward."""

    async def go() -> Observation:
        spec = replace(ADD, environment=replace(ADD.environment, data={"wrong": 1}))
        return await InProcessSession(spec, FAMILY.bundle).start()

    observation = asyncio.run(go())
    assert observation.stop is Stop.ENV_ERROR and "KeyError" in observation.text


def test_untrusted_and_foreign_bundles_are_refused():
    """In-process means no isolation; and a spec runs only with the code it was made for."""
    foreign = ToolBundle("x", "", "")
    with pytest.raises(BackendUnavailable, match="not trusted"):
        InProcessSession(replace(ADD, bundle=foreign.hash), foreign)
    with pytest.raises(TaskError, match="needs bundle"):
        InProcessSession(ADD, foreign)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"correctness": "1"},
        {"correctness": True},
        {"correctness": float("nan")},
        {"correctness": 1.5},
        {"correctness": -1},
        {"correctness": 1, "reasons": "x"},
    ],
)
def test_a_verifier_out_of_range_is_no_verdict(answer: object):
    """correctness None and an error, never 0."""
    verdict = to_verdict(answer, ADD)
    assert verdict.correctness is None and not verdict.passed and verdict.error
