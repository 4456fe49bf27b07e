"""The loop detectors: golden traces, warn once, turns as sets, polls, resets, masks."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.loops import (
    LoopDetector,
    LoopVerdict,
    call_key,
    is_infra_error,
    is_no_information,
    result_key,
)
from sandbox.tool_spec import LoopSpec, PollSpec

CASES = json.loads((Path(__file__).parents[1] / "data" / "cases" / "loops.json").read_text())
POLL = {"status": LoopSpec(poll=PollSpec(5, 12))}


def spec_of(declared: dict[str, Any]) -> LoopSpec:
    """A tool's loop declaration as the golden file writes it."""
    poll = PollSpec(**declared["poll"]) if "poll" in declared else None
    return LoopSpec(poll, **{key: tuple(v) for key, v in declared.items() if key != "poll"})


def verdicts(calls: list[tuple], detector: LoopDetector | None = None, **more: Any) -> list[tuple]:
    """(1-based call, detector, action) of every verdict."""
    detector = detector or LoopDetector()
    found = [detector.record(*call, **more) for call in calls]
    return [(i, v.detector, v.action.value) for i, v in enumerate(found, 1) if v is not None]


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
def test_golden_traces(case: dict[str, Any]):
    """The strongest verdict of each trace, and the call at which it first comes."""
    detector = LoopDetector({name: spec_of(spec) for name, spec in case["tools"].items()})
    strongest: dict[str, Any] | None = None
    for number, call in enumerate(case["calls"], 1):
        error = call.get("error")
        verdict = detector.record(
            call["tool"],
            call["arguments"],
            call["result"],
            error=error,
            infra=error is not None and is_infra_error(error),
            state=call.get("state"),
            time_s=call.get("t"),
        )
        if verdict is None:
            continue
        stop_follows = strongest is not None and strongest["action"] == "warn"
        if strongest is None or (stop_follows and verdict.action == "stop"):
            strongest = {
                "detector": verdict.detector,
                "action": verdict.action.value,
                "at_call": number,
            }
    assert strongest == case["expect"]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("f", {"q": 1}, "x")] * 2, []),
        ([("f", {"q": 1}, "x")] * 4, [(3, "repeat", "warn")]),
        ([("f", {"q": 1}, "x")] * 5, [(3, "repeat", "warn"), (5, "repeat", "stop")]),
        ([("f", {"q": 1}, str(i)) for i in range(9)], []),
        ([("f", {"q": i}, "x") for i in range(9)], []),
        ([("f", {"q": 1}, "x"), ("g", {}, "x")] * 4,
         [(6, "cycle", "warn"), (8, "cycle", "stop")]),
        ([("f", {"a": 1, "b": 2.0}, "x"), ("f", {"b": 2, "a": 1}, "x")] * 2,
         [(3, "repeat", "warn")]),
        ([("f", {"q": "ａ"}, "x y"), ("f", {"q": "a"}, " x  y\n")] * 2, [(3, "repeat", "warn")]),
        ([("f", {"q": 1}, "x")] * 3 + [("g", {}, "y")] + [("f", {"q": 1}, "x")] * 3,
         [(3, "repeat", "warn"), (7, "repeat", "warn")]),
    ],
)  # fmt: skip
def test_a_streak_is_warned_about_once(calls: list, expected: list):
    """Only what ends the history counts; a new streak may be warned about again."""
    assert verdicts(calls) == expected


def test_a_verdict_names_call_count_last_result_and_span():
    """One line for the model; the numbers let a loss mask begin where the loop does."""
    detector = LoopDetector()
    detector.record("ls", {}, "a")
    found = [detector.record("grep", {"q": 1}, "no\nmatch <|im_end|>") for _ in range(5)]
    warning, stop = found[2], found[4]
    assert isinstance(warning, LoopVerdict) and isinstance(stop, LoopVerdict)
    assert (warning.count, warning.span, stop.span) == (3, (2, 4), (2, 6))
    assert "grep answered the same each time (3 times; last result: no match" in warning.reminder
    assert "\n" not in warning.reminder and "<|im_end" not in warning.reminder


def test_parallel_calls_are_a_set():
    """Their order within a turn does not hide a loop, and one turn of equal calls is none."""
    detector = LoopDetector()
    a, b = ("f", {"q": 1}, "x"), ("g", {}, "y")
    found = []
    for turn in range(5):
        for call in (a, b) if turn % 2 else (b, a):
            found.append(detector.record(*call, turn=turn))
    actions = [(v.detector, v.action.value) for v in found if v is not None]
    assert actions[0] == ("repeat", "warn") and actions[-1] == ("repeat", "stop")
    assert verdicts([a] * 20, turn=0) == []


def test_a_poll_may_be_called_max_times():
    """Spaced polls: warned at max, stopped two later; one hurried call does not undo the others."""
    calls = [("status", {"id": 1}, "running")] * 14
    detector = LoopDetector(POLL)
    found = [detector.record(*call, time_s=10.0 * i) for i, call in enumerate(calls)]
    assert [(i, v.action.value) for i, v in enumerate(found, 1) if v] == [
        (12, "warn"),
        (14, "stop"),
    ]
    detector = LoopDetector(POLL)
    times = [0, 10, 20, 20.1, 30, 40, 50, 60]
    assert not any(detector.record(*calls[0], time_s=t) for t in times)


def test_two_polls_in_turn_are_no_cycle():
    """D2 leaves them to D1."""
    detector = LoopDetector({**POLL, "other": POLL["status"]})
    calls = [("status", {}, "running"), ("other", {}, "running")] * 20
    assert not any(detector.record(*call, time_s=9.0 * i) for i, call in enumerate(calls))


def test_new_state_or_message_clears_the_history():
    """And nothing else does."""
    call = ("f", {}, "x")
    detector = LoopDetector()
    assert not any(detector.record(*call, state=str(i)) for i in range(9))
    detector = LoopDetector()
    for _ in range(9):
        assert [detector.record(*call) is None for _ in range(2)] == [True, True]
        detector.new_message()


def test_infrastructure_has_its_own_count():
    """Ten failures in a row stop the episode as nobody's fault; one answer clears the count."""
    detector = LoopDetector()
    found = [detector.record("f", {}, None, error="HTTP 503", infra=True) for _ in range(10)]
    seen = [(i, v.detector, v.action.value, v.infra) for i, v in enumerate(found, 1) if v]
    assert seen == [(6, "infra", "warn", True), (10, "infra", "stop", True)]
    detector = LoopDetector()
    for again in range(4):
        found = [detector.record("f", {}, None, error="HTTP 503", infra=True) for _ in range(5)]
        assert found == [None] * 5
        assert detector.record("f", {}, f"answer {again}") is None


def test_the_same_error_from_different_tools():
    """D4 looks at the message only; another one breaks the streak."""
    denied = "PermissionError: not authorised"
    detector = LoopDetector()
    found = [detector.record(f"t{i}", {"n": i}, None, error=denied) for i in range(5)]
    assert [v.action.value for v in found if v] == ["warn", "stop"]
    detector = LoopDetector()
    for i in range(12):
        error = denied if i % 3 else f"KeyError {i}"
        assert detector.record(f"t{i}", {"n": i}, None, error=error) is None


def test_stagnation():
    """Thirty calls that hold six things, in no order that repeats."""
    draws = Random(3)
    order = [draws.randrange(6) for _ in range(30)]
    found = verdicts([(f"t{n}", {}, f"r{n}") for n in order])
    assert found[-1] == (30, "stagnation", "stop")
    varied = [(f"t{i % 7}", {}, f"r{i % 7}") for i in range(60)]
    assert verdicts(varied) == []


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("took 0.53s", "took 12 ms", True),
        ("pid 123 ok", "pid 77 ok", True),
        ("at 0x7f00", "at 0xffe1", True),
        ("commit 9f86d081", "commit 3ab0c44e", True),
        ("12:30:01 done", "12:31:59.5 done", True),
        ("balance 1200", "balance 1300", False),
        ("deadbeef", "cafebabe", False),
        ("2026-01-01", "2026-01-02", False),
        ({"b": 1, "a": [2.0]}, {"a": [2], "b": 1.0}, True),
        ({"a": 1}, {"a": 2}, False),
    ],
)
def test_results_are_compared_without_what_always_changes(one: Any, other: Any, equal: bool):
    """Ids, times and durations are masked; numbers and dates are data."""
    assert (result_key(one) == result_key(other)) == equal


def test_ignored_keys_are_ignored_at_any_depth_and_in_text():
    """A declared volatile key counts neither in JSON values nor in JSON text."""
    one, other = {"ok": 1, "in": [{"messageId": "m0"}]}, {"ok": 1, "in": [{"messageId": "m1"}]}
    assert result_key(one, ["messageId"]) == result_key(other, ["messageId"])
    assert result_key(json.dumps(one), ["messageId"]) == result_key(
        json.dumps(other), ["messageId"]
    )
    assert result_key("plain", ["messageId"]) == "plain"
    assert call_key("f", {"a": 1, "nonce": 2}, ["nonce"]) == call_key("f", {"a": 1.0})


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("", True), ("[]", True), ("{}", True), ("null", True), ("No results found.", True),
        ("0 rows", True), ("没有结果", True), ("未找到", True), ("no match", True),
        ("ok", False), ("0", False), ("[1]", False), ("no results for cats but 3 dogs", False),
    ],
)  # fmt: skip
def test_no_information(text: str, empty: bool):
    """D3 needs an answer that says nothing; "ok" says something."""
    assert is_no_information(result_key(text)) == empty


@pytest.mark.parametrize(
    ("message", "infra"),
    [
        ("HTTP 429 rate limit", True), ("HTTP 503", True), ("503 Service Unavailable", True),
        ("connection reset by peer", True), ("rate limit exceeded", True), ("HTTP 404", False),
        ("no file 'HTTP 503'", False), ("5000 rows", False), ("read timeout after 3 s", True),
    ],
)  # fmt: skip
def test_infrastructure_messages(message: str, infra: bool):
    """Only how a message begins counts: a policy must not excuse itself by naming a status."""
    assert is_infra_error(message) == infra


@given(
    st.lists(
        st.tuples(
            st.sampled_from("fgh"),
            st.dictionaries(st.sampled_from("abc"), st.integers(0, 2) | st.text(max_size=3)),
            st.none() | st.text(max_size=3) | st.lists(st.integers(0, 1), max_size=2),
            st.none() | st.sampled_from(["E1", "E2"]),
            st.booleans(),
            st.none() | st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_any_trace_gives_verdicts_in_order(trace: list):
    """Nothing raises; a warning is never repeated within a streak; spans are inside the trace."""
    detector = LoopDetector({"f": LoopSpec(cursor_args=("a",)), "g": LoopSpec(poll=PollSpec(1, 9))})
    for number, (tool, arguments, result, error, infra, turn) in enumerate(trace, 1):
        infra = infra and error is not None
        verdict = detector.record(tool, arguments, result, error=error, infra=infra, turn=turn)
        if verdict is not None:
            assert 1 <= verdict.span[0] <= verdict.span[1] == number
            assert "\n" not in verdict.reminder
