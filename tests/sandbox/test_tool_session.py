"""The session's state machine, on real tools in this process."""

import asyncio
import json
from dataclasses import replace

import pytest

from sandbox.calls.policy import RepairMode, RepairPolicy
from sandbox.catalog.lookup_calc.family import LookupCalc
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, SandboxError, TaskError
from sandbox.fakes import InProcessSession, MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.session import Observation, RawCall, Session, SessionState, Stop
from sandbox.task import TaskSpec, ToolBundle
from sandbox.tool_schema import tools_from_source
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


WORLD = """
from sandbox.toolkit import ToolError, tool, workdir

def setup(data):
    (workdir() / "n").write_text("0")

def digest():
    return (workdir() / "n").read_text()

@tool(effect="read", result_schema={"type": "object", "required": ["城市"],
      "properties": {"城市": {"type": "string"}, "温度": {"type": "number"}}})
def weather(answer: str) -> str:
    \"\"\"Any answer.\"\"\"
    if answer.startswith("error:"):
        raise ToolError(answer.removeprefix("error:"))
    return answer

@tool(effect="write", loop={"ignore_result": ["id"]})
def step(city: str = "") -> str:
    \"\"\"Change the world.\"\"\"
    file = workdir() / "n"
    file.write_text(str(int(file.read_text()) + 1))
    return "ok"

@tool(loop={"poll": {"min_interval_s": 0.0, "max": 30}})
def status() -> str:
    \"\"\"Always the same.\"\"\"
    return "running"
"""


def world(**changes: object) -> tuple[TaskSpec, ToolBundle]:
    """A task over WORLD's tools."""
    bundle = ToolBundle("world", WORLD, "def verify(**_): return {'correctness': 1}", trusted=True)
    spec = TaskSpec("w", "t", "go", tools_from_source(WORLD), bundle.hash)
    return replace(spec, **changes), bundle


async def act(
    *calls: tuple[str, str], repair: RepairPolicy | None = None, turn: int | None = None, **changes
) -> list[Observation]:
    """Make the calls (tool, arguments text) in WORLD until one stops the episode."""
    spec, bundle = world(**changes)
    session = InProcessSession(spec, bundle, repair=repair or RepairPolicy())
    await session.start()
    seen = []
    for name, text in calls:
        seen.append(await session.call(RawCall(name, text, turn=turn)))
        if seen[-1].stop is not None:
            break
    await session.close()
    return seen


def answering(text: str) -> tuple[str, str]:
    return "weather", json.dumps({"answer": text})


def test_an_answer_is_read_in_the_words_of_its_schema():
    """The model sees the declared keys; the repairs are the API's, marked as such."""
    seen = asyncio.run(act(answering('{"city":"北京","temperature":"3"}')))[0]
    assert json.loads(seen.text) == {"城市": "北京", "温度": 3} and seen.error is None
    assert seen.repairs == (
        *("result:key_alias:city->城市", "result:key_alias:temperature->温度"),
        "result:coerce:温度",
    )


def test_an_answer_that_cannot_be_read_ends_the_episode():
    """With its own stop; a refusal of the tool or an answer that was cut off is no answer."""
    seen = asyncio.run(act(answering("<html>")))[0]
    assert (seen.stop, seen.error) == (Stop.UNPARSED_RESULT, "unparsed_result")
    assert seen.text.startswith("unparsed_result: the answer is not JSON")
    refused = asyncio.run(act(answering("error:no such city")))[0]
    assert (refused.stop, refused.error) == (None, "tool_error")
    limits = replace(ADD.limits, max_output_bytes=90)
    cut = asyncio.run(act(answering('{"城市":"' + "a" * 99 + '"}'), limits=limits))[0]
    assert (cut.stop, cut.error) == (None, "tool_error") and "ask for less" in cut.text


def test_upstream_failures_are_nobodys_loop():
    """A reminder at the sixth in a row, the end at the tenth, with an outcome of its own."""
    seen = asyncio.run(act(*[answering("error:HTTP 503 Service Unavailable")] * 12))
    assert len(seen) == 10 and {o.error for o in seen} == {"infra_error"}
    assert seen[5].loop == "infra:warn" and seen[9].loop == "infra:stop"
    assert seen[9].stop is Stop.INFRA_ERROR


def test_a_declared_state_tells_progress_from_a_loop():
    """Equal calls with equal answers go on while the digest changes."""
    calls = [("step", "{}")] * 9
    assert asyncio.run(act(*calls))[-1].stop is Stop.LOOP
    seen = asyncio.run(act(*calls, state_digest="digest"))
    assert len(seen) == 9 and all(observation.loop is None for observation in seen)


def test_a_state_digest_that_fails_is_the_environments_fault():
    """A function that does not exist ends the episode without a reward."""
    seen = asyncio.run(act(("step", "{}"), state_digest="nowhere"))[-1]
    assert seen.stop is Stop.ENV_ERROR and "state_digest nowhere" in seen.text


def test_a_real_box_answers_for_the_state():
    """The digest comes out of the box the tools run in."""

    async def go() -> list[Observation]:
        spec, bundle = world(state_digest="digest")
        config = SandboxConfig(unsafe_local=True)
        pool = SandboxPool(bundle, size=1, leases=MemoryLeases(), config=config)
        await pool.start()
        try:
            session = await pool.acquire(spec)
            await session.start()
            seen = [await session.call(RawCall("step", "{}")) for _ in range(6)]
            await session.close()
        finally:
            await pool.close()
        return seen

    assert [observation.loop for observation in asyncio.run(go())] == [None] * 6


def test_a_stop_tells_where_the_loop_began():
    """For a loss mask."""
    seen = asyncio.run(act(answering('{"城市":"a"}'), *[("step", "{}")] * 5))
    assert seen[-1].loop == "repeat:stop" and seen[-1].loop_span == (2, 6)


def test_parallel_calls_of_a_turn_and_polls_are_no_loop():
    """The turn of a call reaches the detector, and so does the tool's declaration."""
    assert len(asyncio.run(act(*[("step", "{}")] * 9, turn=4))) == 9
    assert len(asyncio.run(act(*[("status", "{}")] * 20))) == 20


def test_effect_cap_and_mode_decide_what_is_repaired():
    """A write tool takes an alias but no typo; the task and the run may allow less."""
    alias, typo = ("step", '{"城市":"a"}'), ("step", '{"citty":"a"}')
    seen = asyncio.run(act(alias, typo))
    assert [o.error for o in seen] == [None, "bad_arguments"]
    assert seen[0].repairs == ("key_alias:城市->city",) and seen[0].arguments == {"city": "a"}
    assert asyncio.run(act(alias, key_repair="style"))[0].error == "bad_arguments"
    off = RepairPolicy(RepairMode.OFF)
    assert asyncio.run(act(alias, repair=off))[0].error == "bad_arguments"


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
