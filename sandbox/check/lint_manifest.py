"""Rules over task.toml that the schema cannot say, on the text as written (defaults not added)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sandbox.check.findings import Step
from sandbox.errors import TaskError
from sandbox.manifest.reading import read_toml

_SECRET_NAME = re.compile(r"(?i)(key|token|secret|passw|credential|auth|cookie)")
_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}")
CHANGES = re.compile(
    r"^(delete|remove|drop|write|update|set|send|create|insert|add|post|put|buy|book|cancel|pay"
    r"|transfer|submit|save|edit|rename|move)(_|$)"
)


def lint_manifest(folder: Path, step: Step) -> None:
    """Nothing when the file is no TOML: the step "schema" says so."""
    try:
        data = read_toml(folder / "task.toml")
    except TaskError:
        return
    environment = _table(data, "environment")
    verifier = _table(data, "verifier")
    agent = _table(data, "agent")
    parl = _table(_table(data, "metadata"), "parl")
    _networks(environment, verifier, agent, bool(parl), step)
    _secrets(environment, verifier, step)
    if verifier.get("environment_mode") == "shared":
        step.add(
            "shared-verifier",
            "task.toml: verifier.environment_mode",
            "'shared' runs the tests in the agent's own container, which it can change; write "
            "'separate'",
            "error" if parl else "warning",
        )
    places = {"environment": environment, "verifier.environment": _table(verifier, "environment")}
    for section, table in places.items():
        image = table.get("docker_image")
        if isinstance(image, str) and "@sha256:" not in image:
            step.add(
                "unpinned-image",
                f"task.toml: {section}.docker_image",
                f"{image!r} can change tomorrow; write name@sha256:digest",
            )
    if str(agent.get("user", "")) in ("root", "0"):
        step.add("root-agent", "task.toml: agent.user", "the agent need not be root", "warning")
    _artifacts(data, step)
    _parl(parl, step)


def _networks(
    environment: dict[str, Any],
    verifier: dict[str, Any],
    agent: dict[str, Any],
    ours: bool,
    step: Step,
) -> None:
    for name, table in (("environment", environment), ("agent", agent)):
        if table.get("network_mode") in ("public", "allowlist") or table.get("allow_internet"):
            step.add(
                "agent-network",
                f"task.toml: {name}.network_mode",
                "gives the agent a network, where solutions are; tools reach real services "
                "through the proxy",
                "error" if ours else "warning",
            )
    inner = _table(verifier, "environment")
    for name, table in (("verifier", verifier), ("verifier.environment", inner)):
        if table.get("network_mode") in ("public", "allowlist") or table.get("allow_internet"):
            step.add(
                "verifier-network",
                f"task.toml: {name}.network_mode",
                "a verdict that needs the network changes with it; put what the tests need into "
                "tests/",
            )


def _secrets(environment: dict[str, Any], verifier: dict[str, Any], step: Step) -> None:
    for server in environment.get("mcp_servers", []):
        headers = server.get("headers", {}) if isinstance(server, dict) else {}
        for header, value in headers.items():
            if not _VARIABLE.search(str(value)) and _SECRET_NAME.search(header):
                step.add(
                    "secret-literal",
                    f"task.toml: environment.mcp_servers {server.get('name')!r}: header {header}",
                    "holds a literal credential; write ${VAR}",
                )
    for name, table in (("environment", environment), ("verifier", verifier)):
        for key, value in _table(table, "env").items():
            if _SECRET_NAME.search(key) and value and not _VARIABLE.search(str(value)):
                step.add(
                    "secret-literal",
                    f"task.toml: {name}.env.{key}",
                    "holds a literal credential; write ${VAR}",
                )


def _artifacts(data: dict[str, Any], step: Step) -> None:
    for item in data.get("artifacts", []):
        path = item if isinstance(item, str) else item.get("source", "")
        if re.match(r"^/(tests|solution|logs/verifier)(/|$)", str(path)):
            step.add(
                "mutable-tests",
                "task.toml: artifacts",
                f"{path!r} is carried from the agent's box to the verifier, so the agent can write "
                "its own tests or reward; list only what the agent makes",
            )


def _parl(parl: dict[str, Any], step: Step) -> None:
    low = (parl.get("reward_range") or [0.0])[0]
    threshold = parl.get("pass_threshold", 1.0)
    if isinstance(threshold, int | float) and threshold <= low:
        step.add(
            "threshold-too-low",
            "task.toml: metadata.parl.pass_threshold",
            f"{threshold} is passed by doing nothing; it must be above reward_range[0] = {low}",
        )
    for name, tool in _table(parl, "tools").items():
        if isinstance(tool, dict) and tool.get("effect") == "read" and CHANGES.match(name):
            step.add(
                "effect-mislabeled",
                f"task.toml: metadata.parl.tools.{name}",
                "is declared a read but its name says that it changes something; a read is "
                "repaired and repeated freely",
            )
    if parl.get("determinism") in ("stochastic", "unknown"):
        step.add(
            "not-seeded",
            "task.toml: metadata.parl.determinism",
            f"{parl['determinism']!r}: the same seed should give the same world",
            "warning",
        )


def _table(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    return value if isinstance(value, dict) else {}
