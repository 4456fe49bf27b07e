"""Calls of a real HTTP API through the whole proxy."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config, with_proxy


def call(
    tmp_path: Path, api: ApiServer, tool: str, arguments: dict[str, Any], **config: Any
) -> ProxyResult:
    """One call through a fresh proxy."""

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, tool, arguments)

    return with_proxy(api_config(tmp_path, api, **config), body)


def test_an_answer_and_its_audit_line(tmp_path: Path, api: ApiServer) -> None:
    """Text, JSON value, status and sizes come back; the audit line holds every field."""
    result = call(tmp_path, api, "weather", {"city": "Köln/Bonn"})
    assert (result.error, result.outcome, result.status, result.mode) == (None, "done", 200, "live")
    assert result.value == {"city": "Köln/Bonn", "celsius": 21}
    assert json.loads(result.text) == result.value
    (line,) = map(json.loads, (tmp_path / "state/audit.jsonl").read_text().splitlines())
    assert line["episode"] == "e" and line["policy_version"] == 7 and line["tool"] == "weather"
    assert line["effect"] == "read" and line["status"] == 200 and line["bytes"] == result.num_bytes
    assert set(line) >= {
        "argument_hash", "repairs", "mode", "ms", "cost", "cassette_hit", "outcome", "infra", "at",
    }  # fmt: skip


def test_a_request_error_is_the_policys(tmp_path: Path, api: ApiServer) -> None:
    """4xx: the model reads the API's own words; nothing is infrastructure, nothing is retried."""
    result = call(tmp_path, api, "get_item", {"id": "9"})
    assert (result.error, result.infra, result.status) == ("upstream_4xx", False, 404)
    assert "no item 9" in result.text
    assert api.hits["GET items"] == 1


@pytest.mark.parametrize(
    ("tool", "arguments", "code"),
    [
        ("wether", {}, "unknown_tool"),
        ("weather", {"town": "x"}, "bad_arguments"),
        ("weather", {"city": 3}, "bad_arguments"),
        ("weather", {"city": float("nan")}, "bad_arguments"),
        ("get_item", {}, "bad_arguments"),
        ("get_item", {"id": "../status/200"}, "bad_arguments"),
        ("get_item", {"id": ".."}, "bad_arguments"),
        ("get_item", {"id": "%2e%2e%2fstatus"}, "bad_arguments"),
        ("get_item", {"id": "a\\..\\b"}, "bad_arguments"),
    ],
)
def test_bad_calls_are_refused_before_anything_is_sent(
    tmp_path: Path, api: ApiServer, tool: str, arguments: dict[str, Any], code: str
) -> None:
    """Denied, counted against the policy, no request."""
    result = call(tmp_path, api, tool, arguments)
    assert (result.error, result.infra, result.outcome) == (code, False, "denied")
    assert not api.hits


@pytest.mark.parametrize(
    ("status", "code"), [(500, "upstream_5xx"), (503, "upstream_5xx"), (429, "upstream_429")]
)
def test_failures_of_the_upstream_are_retried_then_infrastructure(
    tmp_path: Path, api: ApiServer, status: int, code: str
) -> None:
    """Three attempts, then a typed failure that never counts against the policy."""
    arguments = {"status": status, "times": 9}
    result = call(tmp_path, api, "flaky", arguments)
    assert (result.error, result.infra, result.status) == (code, True, status)
    assert result.num_attempts == api.hits["GET flaky"] == 3


def test_a_retry_that_helps(tmp_path: Path, api: ApiServer) -> None:
    """Retry-After is waited for; the answer is an ordinary one."""
    begin = time.perf_counter()
    result = call(tmp_path, api, "flaky", {"status": 429, "times": 1, "wait": "0.3"})
    assert (result.error, result.value, result.num_attempts) == (None, {"tries": 2}, 2)
    assert time.perf_counter() - begin >= 0.3


def test_an_upstream_that_wants_a_long_pause_has_failed(tmp_path: Path, api: ApiServer) -> None:
    """A Retry-After over the limit is not waited for."""
    result = call(tmp_path, api, "flaky", {"status": 429, "times": 1, "wait": "3600"})
    assert (result.error, result.num_attempts) == ("upstream_429", 1)


@pytest.mark.parametrize(
    ("tool", "arguments", "attempts", "outcome", "code"),
    [
        ("drop", {"name": "x"}, 1, "unknown", "outcome_unknown"),
        ("drop_read", {}, 3, "failed", "unreachable"),
        ("fail", {"status": 500}, 1, "unknown", "outcome_unknown"),
        ("fail", {"status": 504}, 1, "unknown", "outcome_unknown"),
        ("fail", {"status": 503}, 3, "failed", "upstream_5xx"),
        ("fail", {"status": 429}, 3, "failed", "upstream_429"),
    ],
)
def test_a_lost_reply_is_never_asked_for_twice(
    tmp_path: Path,
    api: ApiServer,
    tool: str,
    arguments: dict[str, Any],
    attempts: int,
    outcome: str,
    code: str,
) -> None:
    """A write whose reply is lost has outcome unknown after one attempt; reads and requests that
    were certainly not carried out are retried."""
    result = call(tmp_path, api, tool, arguments)
    assert (result.outcome, result.error, result.infra) == (outcome, code, True)
    assert result.num_attempts == sum(api.hits.values()) == attempts


def test_a_write_that_never_left_is_not_unknown(tmp_path: Path, api: ApiServer) -> None:
    """No name, no connection: it failed, and certainly had no effect."""

    async def hang(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, "add_item", {"name": "x"})

    cases: list[dict[str, Any]] = [
        {"network": {"connect_timeout_s": 0.1}},
        {"network": {"connect_timeout_s": 60}, "limits": {"timeout_s": 0.1}},
    ]
    for timeouts in cases:
        config = api_config(
            tmp_path, api, upstream={"server_url": "http://api.parl.test/v1"}, **timeouts
        )
        (tmp_path / "state/journal.jsonl").unlink(missing_ok=True)
        result = with_proxy(config, body, resolve=hang)
        assert (result.outcome, result.error, result.num_attempts) == ("failed", "unreachable", 3)


def test_a_declared_idempotency_header_makes_a_write_repeatable(
    tmp_path: Path, api: ApiServer
) -> None:
    """Every attempt carries the same key; without a declaration there is none."""
    tools = {"drop": {"idempotency_header": "Idempotency-Key"}}
    result = call(tmp_path, api, "drop", {"name": "x"}, upstream={"tools": tools})
    keys = {headers.get("Idempotency-Key") for _, _, headers, _ in api.seen}
    assert (result.outcome, len(api.seen), len(keys)) == ("unknown", 3, 1)
    assert len(keys.pop() or "") == 64
    api.forget()
    call(tmp_path, api, "add_item", {"name": "x"})
    assert "Idempotency-Key" not in api.seen[0][2]


def test_a_call_delivered_again_runs_once(tmp_path: Path, api: ApiServer) -> None:
    """Same index, same call: the first one's result, also while it runs; another call under the
    same index is refused."""

    async def body(proxy: ToolProxy, token: str) -> None:
        calls = [proxy.call(token, "add_item", {"name": "a"}, call_index=0) for _ in range(5)]
        results = await asyncio.gather(*calls)
        assert {result.text for result in results} == {'{"id": 0}'}
        other = await proxy.call(token, "add_item", {"name": "b"}, call_index=0)
        assert other.error == "call_index_reused"

    with_proxy(api_config(tmp_path, api), body)
    assert api.items == ["a"]


def test_a_restarted_proxy_does_not_send_a_write_again(tmp_path: Path, api: ApiServer) -> None:
    """The journal is on disk before the request is; the call delivered again is unknown."""

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, "add_item", {"name": "a"}, call_index=0)

    first = with_proxy(api_config(tmp_path, api), body)
    again = with_proxy(api_config(tmp_path, api), body)
    assert (first.outcome, again.outcome, again.error) == ("done", "unknown", "outcome_unknown")
    assert api.items == ["a"]


def test_a_caller_that_goes_away_does_not_stop_a_call(tmp_path: Path, api: ApiServer) -> None:
    """The call ends and is audited; the caller can ask for its result again."""

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        asking = asyncio.ensure_future(proxy.call(token, "slow", {"seconds": 0.2}, call_index=0))
        await asyncio.sleep(0.05)
        asking.cancel()
        return await proxy.call(token, "slow", {"seconds": 0.2}, call_index=0)

    result = with_proxy(api_config(tmp_path, api), body)
    assert result.value == {"slept": "0.2"} and api.hits["GET slow"] == 1


@pytest.mark.parametrize(
    ("tool", "arguments"), [("slow", {"seconds": 5}), ("drip", {})], ids=["silent", "slowloris"]
)
def test_time_is_capped(
    tmp_path: Path, api: ApiServer, tool: str, arguments: dict[str, Any]
) -> None:
    """One attempt has a limit to its last byte, however the bytes come."""
    begin = time.perf_counter()
    config = {"limits": {"timeout_s": 0.2}, "retry": {"max_attempts": 1}}
    result = call(tmp_path, api, tool, arguments, **config)
    assert (result.error, result.infra) == ("unreachable", True)
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    ("tool", "arguments"), [("huge", {"size": 2_000_000}), ("bomb", {})], ids=["huge", "gzip bomb"]
)
def test_size_is_capped(
    tmp_path: Path, api: ApiServer, tool: str, arguments: dict[str, Any]
) -> None:
    """Counted after decompression; the model is told to ask for less."""
    result = call(tmp_path, api, tool, arguments, limits={"max_body_bytes": 1_000_000})
    assert (result.error, result.infra) == ("response_too_large", False)


def test_long_text_is_cut_with_a_marker(tmp_path: Path, api: ApiServer) -> None:
    """What the model reads has a limit of its own."""
    result = call(tmp_path, api, "huge", {"size": 5000}, limits={"max_text_bytes": 1000})
    assert result.cut and result.num_bytes == 5000 and result.value is None
    assert len(result.text) <= 1000 and result.text.endswith("[cut: 5000 bytes]")


def test_binary_is_refused(tmp_path: Path, api: ApiServer) -> None:
    """Bytes that are no text never reach the model."""
    result = call(tmp_path, api, "binary", {})
    assert (result.error, result.infra) == ("binary_refused", False)
    assert "image/png, 256 bytes" in result.text


def test_terminal_escapes_are_made_visible(tmp_path: Path, api: ApiServer) -> None:
    """Control characters and direction overrides cannot act on who prints the trajectory."""
    assert call(tmp_path, api, "escapes", {}).text == "a\\x1b[2Jb\\u202ec"


def test_redirects_stay_within_the_origin_and_the_rules(tmp_path: Path, api: ApiServer) -> None:
    """To an offered path: followed. To another host, or to a path that is no tool: refused."""
    followed = call(tmp_path, api, "redirect", {"to": "/v1/weather?city=Rome"})
    assert followed.value == {"city": "Rome", "celsius": 21}
    elsewhere = call(tmp_path, api, "redirect", {"to": f"http://localhost:{api.port}/v1/weather"})
    assert (elsewhere.error, elsewhere.infra) == ("redirect_refused", True)
    inside = call(tmp_path, api, "redirect", {"to": "/admin"})
    assert inside.error == "access_denied"
    around = call(tmp_path, api, "redirect", {"to": "/v1/redirect?to=/v1/redirect"})
    assert around.infra and around.error in ("redirect_refused", "upstream_5xx", "unreachable")


def test_access_rules_narrow_the_document(tmp_path: Path, api: ApiServer) -> None:
    """deny wins over allow; what no rule allows is denied before quotas and secrets."""
    rules = {
        "allow": [{"methods": ["GET"], "path": "/v1/**"}],
        "deny": [{"methods": ["*"], "path": "/v1/items/*"}],
    }
    for tool, arguments, error in [
        ("weather", {"city": "x"}, None),
        ("get_item", {"id": "1"}, "access_denied"),
        ("add_item", {"name": "x"}, "access_denied"),
    ]:
        assert call(tmp_path, api, tool, arguments, upstream=rules).error == error
    assert set(api.hits) == {"GET weather"}


def test_live_read_refuses_what_may_write(tmp_path: Path, api: ApiServer) -> None:
    """The effect class decides, the author's word before the verb's."""
    tools = {"echo_post": {"effect": "read"}}
    config = {"mode": "live_read", "upstream": {"tools": tools}}
    assert call(tmp_path, api, "weather", {"city": "x"}, **config).error is None
    assert call(tmp_path, api, "echo_post", {"q": "x"}, **config).error is None
    denied = call(tmp_path, api, "add_item", {"name": "x"}, **config)
    assert (denied.error, denied.outcome) == ("effect_forbidden", "denied")
    assert not api.items


def test_no_cookie_travels_between_calls(tmp_path: Path, api: ApiServer) -> None:
    """Episodes share connections, never a session."""

    async def body(proxy: ToolProxy, token: str) -> None:
        for _ in range(2):
            await proxy.call(token, "weather", {"city": "x"})

    with_proxy(api_config(tmp_path, api), body)
    assert all("Cookie" not in headers for _, _, headers, _ in api.seen)


def test_a_full_disk_stops_calls_instead_of_hiding_them(tmp_path: Path, api: ApiServer) -> None:
    """Without an audit line there is no call; with the disk free again calls go on."""
    (tmp_path / "state").mkdir()
    audit = tmp_path / "state/audit.jsonl"
    audit.symlink_to("/dev/full")

    async def body(proxy: ToolProxy, token: str) -> None:
        first = await proxy.call(token, "add_item", {"name": "a"})
        assert (first.error, first.infra, first.outcome) == ("record_failed", True, "done")
        second = await proxy.call(token, "add_item", {"name": "b"})
        assert (second.error, second.infra, second.outcome) == ("record_failed", True, "failed")
        assert api.items == ["a"]

    with_proxy(api_config(tmp_path, api), body)


def test_the_canary_shows_who_obeys_tool_output(tmp_path: Path, api: ApiServer) -> None:
    """Results end in a per-episode mark; arguments that hold it are flagged and audited."""

    async def body(proxy: ToolProxy, token: str) -> None:
        result = await proxy.call(token, "weather", {"city": "x"})
        canary = result.text.rpartition("repeat: ")[2].rstrip("]")
        assert canary.startswith("parl-") and not result.canary_leak
        assert (await proxy.call(token, "weather", {"city": f"see {canary}"})).canary_leak

    with_proxy(api_config(tmp_path, api, canary=True), body)
    lines = [json.loads(line) for line in (tmp_path / "state/audit.jsonl").open()]
    assert [line["canary_leak"] for line in lines] == [False, True]
