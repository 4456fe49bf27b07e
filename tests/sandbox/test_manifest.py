"""task.toml: what is accepted, what is refused and how it is said, and the way back to text."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import TaskError
from sandbox.manifest.reading import parse_manifest
from sandbox.manifest.rendering import render_manifest, render_toml

FULL = """
version = "1.4"
source = "https://example.org/x"
multi_step_reward_strategy = "mean"
artifacts = ["/out/a.txt", { source = "/b", destination = "b" }]

[task]
name = "org/name"
version = "2"
description = "d"
authors = [{ name = "A", email = "a@example.org" }]
keywords = ["k"]

[metadata]
difficulty = "hard"
nested = { empty = {}, list = [1, 2.5, true] }

[metadata.parl]
task_type = "t"
min_tokens = 10
reward_range = [0, 1]
pass_threshold = 0.5
determinism = "stochastic"
seed = 4
state_digest = "digest"
key_repair = "fuzzy"
forbidden_tools = ["rm"]
proxy = { mode = "replay" }
budget = { units = { calls = 3 }, max_turns = 4, max_output_bytes = 9 }

[metadata.parl.tools.get]
effect = "write"
idempotent = true
aliases = ["fetch"]
key_aliases = { path = ["file_path"] }
cache = true
ttl_s = 3
rate = 1.5
schema = { type = "object" }
loop = { poll = { min_interval_s = 1, max = 3 }, cursor_args = ["page"] }

[verifier]
timeout_sec = 30
env = { A = "b" }
user = "root"
network_mode = "no-network"
allowed_hosts = []
environment_mode = "shared"
environment = { docker_image = "x" }
collect = [{ command = "ls", service = "s", timeout_sec = 1, user = 0 }]

[agent]
timeout_sec = 5
user = 1000
network_mode = "allowlist"
allowed_hosts = ["example.org"]

[solution]
env = { X = "${Y:-z}" }

[environment]
build_timeout_sec = 1.5
os = "linux"
cpus = 2
memory_mb = 512
storage_mb = 64
gpus = 0
gpu_types = ["h200"]
tpu = { type = "v5", topology = "2x2" }
mcp_servers = [{ name = "m", transport = "stdio", command = "c", args = ["a"] }]
skills_dir = "/skills"
healthcheck = { command = "true", retries = 2 }
workdir = "/app"
allow_internet = false
memory = "2G"
storage = "1G"

[[steps]]
name = "one"
min_reward = 0.5
artifacts = ["/x"]
[steps.agent]
timeout_sec = 3
"""
MINIMAL = '[task]\nname = "org/name"\n'


def test_every_harbor_and_parl_key_is_accepted_and_survives_rendering():
    """All fields of Harbor 1.4 and of [metadata.parl] are read and written back unchanged."""
    manifest = parse_manifest(FULL, "task.toml")
    assert manifest.metadata.parl is not None
    assert manifest.metadata.parl.tools["get"].parameters == {"type": "object"}
    assert parse_manifest(render_manifest(manifest), "again") == manifest


def test_defaults_are_stricter_than_harbors_and_written_out():
    """No network and a separate verifier, said explicitly so that Harbor reads the same."""
    text = render_manifest(parse_manifest(MINIMAL, "task.toml"))
    data = tomllib.loads(text)
    assert data["environment"]["network_mode"] == "no-network"
    assert data["verifier"]["environment_mode"] == "separate"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[task\n", "f.toml:1:6: not valid TOML"),
        ('[task]\nname = "a/b"\nname = "c"', "f.toml:3:"),
        ("[task]\nname = ", "f.toml:2:8: not valid TOML"),
        (
            MINIMAL + "[agent]\ntimeout = 3",
            "unknown key 'agent.timeout': did you mean 'timeout_sec'",
        ),
        (MINIMAL + "[zzz]\na = 1", "unknown key 'zzz': known keys: agent"),
        (
            MINIMAL + '[metadata.parl]\ntask_type = "t"\nmin_token = 3',
            "unknown key 'metadata.parl.min_token': did you mean 'min_tokens'",
        ),
        (
            MINIMAL + '[metadata.parl]\ntask_type = "t"\ntools = { get = { effct = "read" } }',
            "unknown key 'metadata.parl.tools.get.effct': did you mean 'effect'",
        ),
        (
            MINIMAL + '[[environment.mcp_servers]]\nname = "m"\nurll = "x"',
            "unknown key 'environment.mcp_servers.0.urll': did you mean 'url'",
        ),
        (MINIMAL + '[verifier]\ntimeout_sec = "600"', "key 'verifier.timeout_sec' = '600'"),
        ("", "missing key 'task': add it"),
        ('schema_version = "9"\n' + MINIMAL, "key 'schema_version' = '9'"),
    ],
)
def test_mistakes_name_file_key_and_nearest_key(text: str, expected: str):
    """One line: file (with line and column for bad TOML), dotted key, what to write instead."""
    with pytest.raises(TaskError) as caught:
        parse_manifest(text, "f.toml")
    message = str(caught.value)
    assert message.startswith("f.toml:") and expected in message and "\n" not in message


VALUES = st.recursive(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, max_size=4))
def test_rendered_toml_reads_back_equal(table: dict):
    """The writer emits TOML the standard library's reader agrees with."""
    assert tomllib.loads(render_toml(table)) == table


def test_unreadable_file_is_a_task_error(tmp_path: Path):
    """A missing task.toml is the user's mistake, not a traceback."""
    from sandbox.task import load_task

    with pytest.raises(TaskError, match=r"task\.toml: no such file; a task needs it"):
        load_task(tmp_path)
