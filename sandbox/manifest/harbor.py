"""Every root key and section of a Harbor 1.4 ``task.toml``, typed.

Source: facts/sandboxes.md 1.1 (Harbor 0.26). Two defaults are stricter than Harbor's: the network
is off and the verifier runs in a separate environment; both are always written out when rendered,
so the file means the same to Harbor. Our own keys live under ``[metadata.parl]``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandbox.manifest.parl_section import ParlSection

NetworkMode = Literal["no-network", "public", "allowlist"]
SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")


class _Section(BaseModel):
    """Strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Author(_Section):
    name: str
    email: str | None = None


class TaskSection(_Section):
    """``[task]``: identity."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
    """``org/name``."""
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []


class Healthcheck(_Section):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class McpServer(_Section):
    """Headers may hold ``${VAR}`` only, never a literal credential (checked by the lint)."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}


class Tpu(_Section):
    type: str
    topology: str


class EnvironmentSection(_Section):
    """``[environment]``: the world of the agent. ``_mb`` are MiB."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: list[str] | None = None
    tpu: Tpu | None = None
    mcp_servers: list[McpServer] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: NetworkMode = "no-network"
    """Harbor's default is ``public``."""
    allowed_hosts: list[str] = []
    allow_internet: bool | None = None
    """Legacy (Harbor < 1.2), like ``memory`` and ``storage``."""
    memory: str | None = None
    storage: str | None = None


class Collect(_Section):
    command: str
    service: str | None = None
    timeout_sec: float | None = None
    user: str | int | None = None


class VerifierSection(_Section):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: NetworkMode = "no-network"
    allowed_hosts: list[str] = []
    environment_mode: Literal["shared", "separate"] = "separate"
    """Harbor's default is ``shared``."""
    environment: EnvironmentSection | None = None
    collect: list[Collect] = []


class AgentSection(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = []


class SolutionSection(_Section):
    env: dict[str, str] = {}


class Step(_Section):
    """One entry of ``[[steps]]`` (multi-step tasks)."""

    name: str
    agent: AgentSection | None = None
    verifier: VerifierSection | None = None
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | dict[str, Any]] = []


class Metadata(BaseModel):
    """``[metadata]``: a free table in Harbor; only ``parl`` is ours and typed."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    parl: ParlSection | None = None


class Manifest(_Section):
    """A whole ``task.toml``. ``version`` is the old name of ``schema_version``."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.4"
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: list[str | dict[str, Any]] = []
    task: TaskSection
    metadata: Metadata = Metadata()
    verifier: VerifierSection = VerifierSection()
    agent: AgentSection = AgentSection()
    solution: SolutionSection = SolutionSection()
    environment: EnvironmentSection = EnvironmentSection()
    steps: list[Step] = []
