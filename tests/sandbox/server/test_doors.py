"""Episodes through the two doors of a real server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sandbox.catalog.lookup_calc.family import LookupCalc
from tests.sandbox.server.conftest import ADD, Agent, ServerProcess, bearer

FAMILY = LookupCalc()
SPEC = FAMILY.instance(3, 5, "train", "add")
ORACLE = FAMILY.oracle(SPEC)
CALLS = [call for calls in ORACLE.rounds for call in calls]


def solve(agent: Agent) -> None:
    """Play the oracle's calls, in turns of both shapes."""
    for number, call in enumerate(CALLS):
        body: dict[str, Any] = {
            "name_text": call.name_text,
            "arguments_text": call.arguments_text,
            "turn": number,
        }
        if number % 2:
            function = {"name": call.name_text, "arguments": call.arguments_text}
            body = {"id": f"call_{number}", "type": "function", "function": function}
        answer = agent.send(body)
        assert answer.status_code == 200, answer.text
        seen = answer.json()
        assert seen["error"] is None and seen["tool"] in ("lookup", "calc")
        assert seen["tool_call_id"] == body.get("id")


def test_a_whole_episode(server: ServerProcess):
    """create, task, calls of both shapes, verify, close; and what the orchestrator sees of it."""
    session_id, agent = server.create(owner="episode-7")
    task = agent.task().json()
    assert task["instruction"] == SPEC.instruction and task["open"] is True
    assert task["tools"] == [tool.to_openai() for tool in SPEC.tools]
    solve(agent)
    verdict = server.verify(session_id, ORACLE.final_text).json()
    assert (verdict["correctness"], verdict["passed"], verdict["error"]) == (1.0, True, None)
    seen = server.inspect(session_id)
    assert seen["content_hash"] == SPEC.content_hash and seen["owner"] == "episode-7"
    assert (seen["state"], seen["num_calls"], seen["stop"]) == ("verified", len(CALLS), None)
    assert seen["level"] == seen["enforced"]["level"] and seen["enforced"]["network"] == "none"
    assert agent.send({"name_text": "lookup", "arguments_text": "{}"}).status_code == 409
    closed = server.close(session_id)
    assert closed.status_code == 200 and closed.json()["closed_because"] == "client"
    again = server.close(session_id)
    assert (again.status_code, again.json()["error"]) == (404, "session_closed")
    assert agent.task().status_code == 401, "a token ends with its session"
    assert server.closed(session_id)["verdict"] == verdict


def test_a_repeated_verify_gets_the_same_verdict(server: ServerProcess):
    """The answer may have been lost; another final text is another question."""
    session_id, agent = server.create()
    solve(agent)
    first = server.verify(session_id, ORACLE.final_text)
    assert server.verify(session_id, ORACLE.final_text).json() == first.json()
    other = server.verify(session_id, "77")
    assert (other.status_code, other.json()["error"]) == (409, "wrong_state")
    server.close(session_id)


def test_violations_are_observations(server: ServerProcess):
    """The second unknown tool ends the episode with 200 and a stop; the session can be judged."""
    session_id, agent = server.create()
    assert agent.call("functions.look:0", "{}")["stop"] is None
    seen = agent.call("functions.look:1", "{}")
    assert (seen["error"], seen["stop"]) == ("unknown_tool", "illegal_call")
    refused = agent.send({"name_text": "lookup", "arguments_text": "{}"})
    assert (refused.status_code, refused.json()["error"]) == (409, "wrong_state")
    assert agent.task().json()["open"] is False
    assert server.inspect(session_id)["stop"] == "illegal_call"
    assert server.verify(session_id, ORACLE.final_text).json()["correctness"] is not None
    server.close(session_id)


def test_repairs_and_loops_are_counted(server: ServerProcess):
    """A typo in a key, then the same call until the detector ends it."""
    session_id, agent = server.create()
    key = CALLS[0].arguments_text
    seen = agent.call("lookup", json.dumps({"Key": json.loads(key)["key"]}))
    assert seen["error"] is None and seen["repairs"], seen
    verdicts = [agent.call("lookup", key) for _ in range(4)]
    assert verdicts[-1]["stop"] == "loop"
    body = server.inspect(session_id)
    assert sum(body["repairs"].values()) == len(seen["repairs"])
    assert [loop["verdict"] for loop in body["loops"]] == ["repeat:warn", "repeat:stop"]
    assert body["loops"][-1]["span"][1] == 5
    server.close(session_id)


def test_repair_can_be_switched_off(server: ServerProcess):
    session_id, agent = server.create(repair="off")
    assert agent.call("lookup", '{"Key":"a"}')["error"] == "bad_arguments"
    server.close(session_id)


@pytest.mark.parametrize(
    "arguments",
    ['{"key":"\\ud800"}', "\x00\x1b[31m", "[" * 50_000, '{"key":NaN}', '{"key":1e999}', "中" * 99],
)
def test_any_text_of_a_model_gets_an_observation(server: ServerProcess, arguments: str):
    """Half surrogates, control characters, deep nesting, numbers JSON does not have."""
    session_id, agent = server.create()
    seen = agent.call("lookup", arguments)
    assert seen["error"] is not None and seen["text"]
    server.close(session_id)


def test_a_repeated_create_returns_the_same_session(server: ServerProcess):
    """Same key, same body: same session and token, one box. Another body: 409."""
    answers = [
        server.post("/sessions", {"task": ADD}, **{"Idempotency-Key": "abc-1"}) for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [201] * 3
    assert len({answer.json()["agent_token"] for answer in answers}) == 1
    replayed = [answer.headers.get("Idempotency-Replayed") for answer in answers]
    assert replayed == [None, "true", "true"]
    other = server.post("/sessions", {"task": {**ADD, "index": 6}}, **{"Idempotency-Key": "abc-1"})
    assert (other.status_code, other.json()["error"]) == (409, "idempotency_key_reused")
    server.close(answers[0].json()["session"]["id"])
    assert server.get("/pools")["in_use"] == 0


def test_a_repeated_call_runs_once(server: ServerProcess):
    """The second delivery of a call gets the first one's observation and counts nothing."""
    session_id, agent = server.create()
    body = {"name_text": CALLS[0].name_text, "arguments_text": CALLS[0].arguments_text}
    texts = [agent.send(body, **{"Idempotency-Key": "call-0"}).json() for _ in range(8)]
    assert all(text == texts[0] for text in texts) and texts[0]["stop"] is None
    assert server.inspect(session_id)["num_calls"] == 1
    server.close(session_id)


@pytest.mark.parametrize(
    ("task", "status", "said"),
    [
        ({"family": "lookup_cal", "task_type": "add"}, 404, "known: "),
        ({"family": "lookup_calc", "task_type": "ad"}, 404, "known: lookup, add"),
        ({"folder": "nowhere"}, 404, "task roots: none"),
        ({"folder": "../etc"}, 422, "pattern"),
        ({**ADD, "seed": -1}, 422, "greater than or equal to 0"),
        ({**ADD, "seed": "1"}, 422, "valid integer"),
        ({**ADD, "extra": 1}, 422, "Extra inputs"),
    ],
)
def test_a_task_that_is_not_there(server: ServerProcess, task: Any, status: int, said: str):
    """A typed body with one line, and no session."""
    answer = server.post("/sessions", {"task": task})
    body = answer.json()
    assert (answer.status_code, body["infra"]) == (status, False), body
    assert said in body["message"] and "\n" not in body["message"]
    assert server.get("/pools")["in_use"] == 0


def test_lists_and_metrics(server: ServerProcess):
    """Open sessions newest first, closed ones apart, counters for each."""
    created = server.metric("parl_sandbox_sessions_created_total")
    closed = server.metric('parl_sandbox_sessions_closed_total{because="client"}')
    ids = [server.create()[0] for _ in range(3)]
    listed = server.get("/sessions")
    assert [body["id"] for body in listed["sessions"]] == ids[::-1] and listed["total"] == 3
    assert [b["id"] for b in server.get("/sessions", offset=1, limit=1)["sessions"]] == [ids[1]]
    assert server.metric("parl_sandbox_sessions") == 3
    for session_id in ids:
        server.close(session_id)
    assert server.get("/sessions")["total"] == 0
    assert [b["id"] for b in server.get("/closed")["sessions"]][:3] == ids[::-1]
    assert server.metric("parl_sandbox_sessions_created_total") == created + 3
    assert server.metric('parl_sandbox_sessions_closed_total{because="client"}') == closed + 3


def test_health_needs_no_token(server: ServerProcess):
    for path in ("/healthz", "/readyz"):
        assert httpx.get(server.url + path).json() == {"status": "ok"}


def test_the_agent_learns_nothing_but_its_task(server: ServerProcess):
    """Neither the verifier's data nor a path, an id of another session or a limit of the box."""
    session_id, agent = server.create()
    other, _ = server.create()
    text = agent.task().text + json.dumps(agent.call("lookup", CALLS[0].arguments_text))
    answer = json.dumps(SPEC.verifier.data)
    for secret in (answer, "verifier", "enforced", str(server.state_dir), session_id, other):
        assert secret not in text, secret
    assert bearer(agent.token)["Authorization"].split()[1] not in text
    server.close(session_id)
    server.close(other)
