"""Pure rules: access, effects, keys, buckets, shaping, retries, configuration."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.config import load_config
from infra.errors import ConfigError
from sandbox.proxy.__main__ import main
from sandbox.proxy.access import allowed, host_matches, path_matches
from sandbox.proxy.canonical import canonical_json, idempotency_key
from sandbox.proxy.config import AccessRule, ProxyConfig, RetryConfig
from sandbox.proxy.declare import world_of_section
from sandbox.proxy.effects import Hints, effect_of_hints, effect_of_verb
from sandbox.proxy.errors import BinaryRefused, ProxyConfigError, Transient, Unreachable
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult, Reply
from sandbox.proxy.retry import with_retries
from sandbox.proxy.shaping import shape
from sandbox.quota import LocalQuotas
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config, with_proxy


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/v1/**", "/v1", True),
        ("/v1/**", "/v1/a/b", True),
        ("/v1/**", "/v10", False),
        ("/v1/*", "/v1/a", True),
        ("/v1/*", "/v1/a/b", False),
        ("/v1/*/b", "/v1/a/b", True),
        ("/a.c", "/abc", False),
        ("/**", "/", True),
    ],
)
def test_path_globs(pattern: str, path: str, matches: bool) -> None:
    """* stays within a segment, ** crosses, a dot is a dot."""
    assert path_matches(pattern, path) is matches


def test_hosts_and_rules() -> None:
    """A wildcard names subdomains only; no rule, no access; deny wins."""
    assert host_matches("*.a.org", "x.a.org") and host_matches("A.org", "a.ORG.")
    assert not host_matches("*.a.org", "a.org") and not host_matches("*.a.org", "xa.org")
    everything = AccessRule(methods=("*",))
    assert not allowed([], [], "GET", "h", "/")
    assert allowed([everything], [], "PURGE", "h", "/")
    assert not allowed([everything], [everything], "GET", "h", "/")


@pytest.mark.parametrize(
    ("verb", "effect", "idempotent"),
    [
        ("GET", "read", True),
        ("head", "read", True),
        ("POST", "write", False),
        ("PATCH", "write", False),
        ("PUT", "destructive", True),
        ("DELETE", "destructive", True),
        ("TRACE", "destructive", False),
    ],
)
def test_effects_of_verbs(verb: str, effect: str, idempotent: bool) -> None:
    """The verb decides where the author says nothing; the author's word wins."""
    assert effect_of_verb(verb, None, None) == (effect, idempotent)
    assert effect_of_verb(verb, "read", False) == ("read", False)


@pytest.mark.parametrize(
    ("hints", "declared", "trusted", "expected"),
    [
        (Hints(), None, False, ("destructive", False)),
        (Hints(read_only=True), None, False, ("destructive", False)),
        (Hints(read_only=True), None, True, ("read", True)),
        (Hints(destructive=False, idempotent=True), None, True, ("write", True)),
        (Hints(), None, True, ("destructive", False)),
        (Hints(), "read", False, ("read", True)),
        (Hints(read_only=False), "read", False, ("destructive", False)),
        (Hints(destructive=False), "read", False, ("write", False)),
        (Hints(destructive=True), "write", False, ("destructive", False)),
        (Hints(read_only=True), "write", False, ("write", False)),
    ],
)
def test_annotations_only_tighten(
    hints: Hints, declared: Any, trusted: bool, expected: tuple[str, bool]
) -> None:
    """A server's word never loosens; only an author who vouches for it may be led by it."""
    assert effect_of_hints(hints, declared, None, trusted) == expected


def test_idempotency_keys() -> None:
    """The spelling of the arguments does not matter; episode, index, tool, values and key do."""
    base = idempotency_key(b"k" * 32, "e", 1, "t", {"a": 1, "b": [2.0]})
    assert base == idempotency_key(b"k" * 32, "e", 1, "t", {"b": [2], "a": 1.0})
    others = [
        idempotency_key(b"K" * 32, "e", 1, "t", {"a": 1, "b": [2]}),
        idempotency_key(b"k" * 32, "f", 1, "t", {"a": 1, "b": [2]}),
        idempotency_key(b"k" * 32, "e", 2, "t", {"a": 1, "b": [2]}),
        idempotency_key(b"k" * 32, "e", 1, "u", {"a": 1, "b": [2]}),
        idempotency_key(b"k" * 32, "e", 1, "t", {"a": 1, "b": [3]}),
        idempotency_key(b"k" * 32, "e", 1, "t", {"a": True, "b": [2]}),
    ]
    assert len({base, *others}) == 7


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) |
                    st.dictionaries(st.text(), x), max_leaves=10))  # fmt: skip
def test_canonical_json_is_a_fixed_point(value: Any) -> None:
    """Canonical text of what canonical text means is the same text."""
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text


def test_a_bucket_never_gives_more_than_its_rate() -> None:
    """Burst at once, then tokens as they come; a refused call takes nothing."""
    now = [0.0]
    quotas = LocalQuotas(lambda: now[0])

    async def take(max_wait_s: float) -> float:
        return await quotas.take("k", 2.0, 3.0, max_wait_s)

    async def go() -> list[float]:
        first = [await take(1.0) for _ in range(6)]
        now[0] = 1.0
        return first + [await take(0.0) for _ in range(2)]

    assert asyncio.run(go()) == [0.0, 0.0, 0.0, 0.5, 1.0, -1.0, -1.0, -1.0]
    now[0] = 1.5
    assert asyncio.run(take(0.0)) == 0.0


def test_quotas_hold_under_concurrency(tmp_path: Path, api: ApiServer) -> None:
    """200 calls of 20 episodes at once against a bucket of 30 that hardly refills: 30 pass, in two
    seconds' time; the others are refused as infrastructure, the bucket is everybody's."""
    quotas = {"cluster": {"rate_per_s": 0.001, "burst": 30}, "max_wait_s": 0}
    config = api_config(tmp_path, api, quotas=quotas)

    async def body(proxy: ToolProxy, token: str) -> list[ProxyResult]:
        episodes = [await proxy.open_episode(f"e{i}", "w") for i in range(20)]
        calls = [
            proxy.call(episode.token, "weather", {"city": f"{i}"})
            for episode in episodes
            for i in range(10)
        ]
        return await asyncio.gather(*calls)

    results = with_proxy(config, body)
    assert [result.error for result in results].count(None) == api.hits["GET weather"] == 30
    assert {(r.error, r.infra) for r in results if r.error} == {("shared_quota", True)}


def test_waiting_for_a_token_and_the_episodes_own_limits(tmp_path: Path, api: ApiServer) -> None:
    """A short wait is waited; calls, rate and money of an episode are the policy's own affair."""
    tools = {"weather": {"rate": {"rate_per_s": 20, "burst": 1}, "cost": 2.0}}
    quotas = {
        "episode": {"rate_per_s": 1000, "burst": 4},
        "spend_per_episode": 5.0,
        "max_calls_per_episode": 4,
        "max_wait_s": 1,
    }
    config = api_config(tmp_path, api, quotas=quotas, upstream={"tools": tools})

    async def body(proxy: ToolProxy, token: str) -> list[ProxyResult]:
        return [await proxy.call(token, "weather", {"city": "x"}) for _ in range(5)]

    results = with_proxy(config, body)
    assert [result.error for result in results] == [None, None] + ["episode_quota"] * 3
    assert results[1].elapsed_ms > 30 and results[1].cost == 2.0
    assert "budget of 5" in results[2].text and "4 calls" in results[4].text
    assert not any(result.infra for result in results)


def test_another_attempt_is_another_request(tmp_path: Path, api: ApiServer) -> None:
    """A storm of 503 must not send three times what the bucket allows; the failure stays the
    upstream's."""
    bucket = {"cluster": {"rate_per_s": 0.001, "burst": 2}, "max_wait_s": 0}

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, "status", {"code": "503"})

    result = with_proxy(api_config(tmp_path, api, quotas=bucket), body)
    assert (result.error, result.num_attempts) == ("upstream_5xx", 2)
    assert api.hits["GET status"] == 2


def test_the_switch_of_the_cluster_is_turned_by_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that every node sees; without one the line says what to set."""
    switch = tmp_path / "STOP"
    words = ["proxy", "--set", f"state_dir={tmp_path}"]
    named = [*words, "--set", f"kill_switch_file={switch}"]
    for turn, there in (("on", True), ("on", True), ("off", False), ("off", False)):
        monkeypatch.setattr("sys.argv", [*named, "--kill-switch", turn])
        assert main() == 0 and switch.exists() is there
    monkeypatch.setattr("sys.argv", [*words, "--kill-switch", "on"])
    assert main() == 2
    assert "kill_switch_file" in capsys.readouterr().err


def test_a_lost_quota_keeper_refuses(tmp_path: Path, api: ApiServer) -> None:
    """Without the keeper of the cluster's quotas nothing is sent."""

    class Gone(LocalQuotas):
        async def take(self, *args: Any) -> float:
            raise ConnectionError("actor died")

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, "weather", {"city": "x"})

    quotas = {"cluster": {"rate_per_s": 1}}
    result = with_proxy(api_config(tmp_path, api, quotas=quotas), body, quotas=Gone())
    assert (result.error, result.infra, result.outcome) == ("shared_quota", True, "denied")
    assert not api.hits


@pytest.mark.parametrize(
    ("applied", "repeatable", "reads", "attempts", "code"),
    [
        (True, False, False, 1, "outcome_unknown"),
        (True, True, False, 3, "outcome_unknown"),
        (True, True, True, 3, "unreachable"),
        (False, False, False, 3, "unreachable"),
    ],
)
def test_what_is_retried(
    applied: bool, repeatable: bool, reads: bool, attempts: int, code: str
) -> None:
    """Only what may be sent again is; a repeatable write that never got its answer is unknown."""
    made = []

    async def attempt() -> Reply:
        made.append(1)
        raise Transient(Unreachable("x"), applied=applied)

    async def go() -> Any:
        config = RetryConfig(max_attempts=3, backoff_s=0)
        try:
            await with_retries(attempt, config, reads=reads, repeatable=repeatable)
        except Exception as error:
            return error

    error = asyncio.run(go())
    assert (len(made), error.code) == (attempts, code)


@given(st.binary(max_size=2000), st.sampled_from(["text/plain", "application/json", "image/png"]))
def test_shaped_text_is_bounded_printable_text(body: bytes, kind: str) -> None:
    """Any bytes: refused, or text within the limit without control characters."""
    try:
        shaped = shape(Reply(body, kind), 300, "parl-canary")
    except BinaryRefused:
        return
    assert len(shaped.text.encode()) <= 300 and "parl-canary" in shaped.text
    assert not any(ord(char) < 32 and char not in "\n\t" for char in shaped.text)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_configuration_from_toml(tmp_path: Path) -> None:
    """One file per node; kinds are told apart by ``kind``."""
    file = write(
        tmp_path / "proxy.toml",
        """
state_dir = "state"
[secrets.weather]
env = "WEATHER_KEY"
bind = [{host = "api.weather.org", place = "query", name = "appid"}]
[worlds.w.upstreams.api]
kind = "openapi"
document = "openapi.yaml"
tools.weather = {mode = "live_read", rate = {rate_per_s = 2}}
[worlds.w.upstreams.time]
kind = "mcp"
command = "mcp-server-time"
""",
    )
    config = load_config(ProxyConfig, [file])
    assert config.worlds["w"].upstreams["time"].kind == "mcp"
    assert config.default_mode == "replay" and config.agent_path == Path("state/agent.sock")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('state_dir = "s"\nkil_switch = true', "kil_switch"),
        ('state_dir = "s"\n[secrets.a]\nenv = "A"\nfile = "b"', "exactly one of env, file"),
        ('state_dir = "s"\n[worlds.w.upstreams.m]\nkind = "mcp"', "exactly one of command"),
        ('state_dir = "s"\n[worlds.w.upstreams.m]\nkind = "soap"', "soap"),
    ],
)
def test_wrong_configuration_is_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    """File, key and expectation."""
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(ProxyConfig, [write(tmp_path / "proxy.toml", text)])
    assert "\n" not in str(caught.value)


def test_a_tasks_section(tmp_path: Path) -> None:
    """Paths are the task folder's and stay in it; unknown keys are named."""
    section = {"upstreams": {"s": {"kind": "python", "source": "tools/sim.py"}}}
    world = world_of_section(section, tmp_path)
    assert getattr(world.upstreams["s"], "source", None) == tmp_path / "tools/sim.py"
    for bad, words in [
        ({"upstreams": {"s": {"kind": "python", "source": "../../etc/passwd"}}}, "leads out"),
        ({"upstreams": {"s": {"kind": "python", "sourc": "x"}}}, "sourc"),
        ({"secrets": {"a": {"env": "HOME"}}}, "secrets"),
    ]:
        with pytest.raises(ProxyConfigError, match=words):
            world_of_section(bad, tmp_path)


def test_worlds_say_what_is_wrong_before_any_call(tmp_path: Path, api: ApiServer) -> None:
    """A misspelt tool, a mode without cassette or simulator."""

    async def body(proxy: ToolProxy, token: str) -> None:
        return None

    for upstream, words in [
        ({"tools": {"wether": {"effect": "read"}}}, "no tool 'wether'"),
        ({"include": ["wether"]}, "no tool 'wether'"),
        ({"mode": "replay", "cassette": None}, "no cassette"),
        ({"mode": "simulate"}, "simulator has no function"),
        ({"server_url": "ftp://x"}, "expected an http"),
        ({"server_url": "http://user:pass@x"}, "holds a credential"),
        ({"tools": {"weather": {"name": "echo"}}}, "two tools are named 'echo'"),
    ]:
        with pytest.raises(ProxyConfigError, match=words):
            with_proxy(api_config(tmp_path, api, upstream=upstream), body)
