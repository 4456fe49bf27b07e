"""Configuration of the tool proxy: what the operator of a node sets, and what a task declares.

A task's author declares a *world*: upstreams, their tools and modes. The operator declares what no
author may: where secrets come from and which host, method and path they are bound to, which inner
addresses may be reached, quotas and the kill switch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from infra.config import ConfigModel
from sandbox.tool_spec import Effect

Mode = Literal["simulate", "replay", "record", "live_read", "live"]
Match = Literal["strict", "latest"]

UPSTREAM_MODES: frozenset[str] = frozenset({"record", "live_read", "live"})
"""Modes that reach an upstream; the kill switch turns them into replay or simulate."""


class AccessRule(ConfigModel):
    """Allows (or denies) requests; all three parts must match."""

    methods: tuple[str, ...] = ("GET", "HEAD")
    """Upper case; "*" is any."""
    host: str = "*"
    """"api.example.com", "*.example.com" or "*"; the world's upstreams bound what "*" can mean."""
    path: str = "/**"
    """Glob over the percent-encoded path: * within a segment, ** over segments."""


class BucketConfig(ConfigModel):
    """A token bucket: ``burst`` calls at once, ``rate_per_s`` on average."""

    rate_per_s: float = Field(gt=0)
    burst: float = Field(default=1.0, ge=1)


class ToolConfig(ConfigModel):
    """What the author says about one tool; unset keys come from the protocol."""

    effect: Effect | None = None
    idempotent: bool | None = None
    mode: Mode | None = None
    description: str | None = None
    name: str | None = None
    """Name the model sees."""
    idempotency_header: str | None = None
    """Header (OpenAPI) or _meta key (MCP) that carries the idempotency key; declares that the
    upstream honours it, so a lost reply may be asked for again with the same key."""
    cost: float = Field(default=0.0, ge=0)
    """Units charged for a call that is sent to an upstream."""
    rate: BucketConfig | None = None
    timeout_s: float | None = Field(default=None, gt=0)


class _UpstreamConfig(ConfigModel):
    mode: Mode | None = None
    """Default: the node's ``default_mode``."""
    cassette: Path | None = None
    """JSONL file; needed by record and replay."""
    match: Match = "strict"
    simulator: Path | None = None
    """Python file with a ``@tool`` function per tool, for mode simulate."""
    include: tuple[str, ...] = ()
    """Tools to offer; empty = all."""
    exclude: tuple[str, ...] = ()
    tools: dict[str, ToolConfig] = Field(default_factory=dict)
    """Upstream's name of a tool -> what the author says about it."""


class PythonUpstream(_UpstreamConfig):
    """Functions of the author's Python file; runs in a process of its own, without secrets."""

    kind: Literal["python"]
    source: Path
    data: dict[str, Any] = Field(default_factory=dict)
    """Given to ``setup``; an episode's own data is merged over it."""


class OpenApiUpstream(_UpstreamConfig):
    """Operations of an OpenAPI 3 document."""

    kind: Literal["openapi"]
    document: Path
    """JSON or YAML file."""
    server_url: str | None = None
    """Default: the first entry of ``servers``."""
    allow: tuple[AccessRule, ...] = ()
    """When set, a request must match one of these as well as the document."""
    deny: tuple[AccessRule, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request; no place for secrets."""


class McpUpstream(_UpstreamConfig):
    """Tools of an MCP server: ``command`` for stdio, ``url`` for streamable HTTP."""

    kind: Literal["mcp"]
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Added to a minimal environment; no place for secrets."""
    cwd: Path | None = None
    """The server's working directory; its box shows it read-only, as /task."""
    network: bool = False
    """Let the server's box use the network; without it a server that asks an API cannot."""
    url: str | None = None
    session: Literal["episode", "node"] = "episode"
    """One server per episode keeps the state of episodes apart; "node" is for stateless servers."""
    trust_annotations: bool = False
    """The author vouches for the server's read-only and idempotent hints."""
    start_timeout_s: float = Field(default=20.0, gt=0)

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("set exactly one of command (stdio) and url (streamable HTTP)")
        if self.network and self.url is not None:
            raise ValueError("network is for the box of a server over stdio; with url drop it")
        return self


UpstreamConfig = Annotated[
    PythonUpstream | OpenApiUpstream | McpUpstream, Field(discriminator="kind")
]


class WorldConfig(ConfigModel):
    """The tools of one task, ``[metadata.parl.proxy]`` of a task.toml."""

    upstreams: dict[str, UpstreamConfig] = Field(default_factory=dict)


class SignerConfig(ConfigModel):
    """A request signature instead of a copied secret."""

    scheme: str = "aws_sigv4"
    options: dict[str, str] = Field(default_factory=dict)
    """Read by the scheme; aws_sigv4: region, service, access_key_id, session_token (the last two
    name secrets)."""


class BindingConfig(ConfigModel):
    """Where a secret goes; a request that does not match host, method and path never gets it."""

    host: str
    """Exact name or "*.example.com"; for place "env" the base name of the MCP command."""
    methods: tuple[str, ...] = ("*",)
    path: str = "/**"
    place: Literal["header", "query", "body", "env", "sign"] = "header"
    name: str = "Authorization"
    """Header, query parameter, dotted body field or environment variable."""
    format: str = "{secret}"
    """E.g. "Bearer {secret}"."""
    signer: SignerConfig | None = None
    allow_plain_http: bool = False
    """A secret is sent over TLS only, unless this is set."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if "{secret}" not in self.format:
            raise ValueError(f"format {self.format!r} lacks {{secret}}")
        if (self.place == "sign") != (self.signer is not None):
            raise ValueError('place "sign" and signer belong together')
        return self


class SecretConfig(ConfigModel):
    """One credential; exactly one source."""

    env: str | None = None
    file: Path | None = None
    command: tuple[str, ...] | None = None
    """Its standard output, without the final line break."""
    bind: tuple[BindingConfig, ...] = ()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.env, self.file, self.command)) != 1:
            raise ValueError("set exactly one of env, file and command")
        return self


class NetworkConfig(ConfigModel):
    """Which addresses upstreams may lead to."""

    allow_addresses: tuple[str, ...] = ()
    """"127.0.0.1:8080", "10.1.0.0/16" ...: inner addresses that may be reached all the same."""
    dns_ttl_s: float = Field(default=300.0, gt=0)
    """A name keeps its checked address this long."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    max_connections: int = Field(default=256, gt=0)


class LimitsConfig(ConfigModel):
    timeout_s: float = Field(default=30.0, gt=0)
    """One attempt, from connect to the last byte."""
    deadline_s: float = Field(default=120.0, gt=0)
    """One call with its retries and waits."""
    max_body_bytes: int = Field(default=4 << 20, gt=0)
    """Larger answers are refused while they arrive."""
    max_request_bytes: int = Field(default=1 << 20, gt=0)
    max_text_bytes: int = Field(default=65536, ge=256)
    """What the model sees; the rest is cut with a marker."""
    max_redirects: int = Field(default=3, ge=0)


class RetryConfig(ConfigModel):
    max_attempts: int = Field(default=3, ge=1)
    backoff_s: float = Field(default=0.5, ge=0)
    max_retry_after_s: float = Field(default=30.0, ge=0)
    """An upstream that asks for a longer pause has failed."""


class QuotaConfig(ConfigModel):
    """Buckets of calls that reach an upstream; replay and simulate take none."""

    shared: Literal["proxy", "ray"] = "proxy"
    """Who keeps the buckets of tools, credentials and the cluster, and the cluster's spend: this
    proxy alone, or the Ray cluster's actor for every proxy, with its kill switch."""

    episode: BucketConfig | None = None
    upstream_key: BucketConfig | None = None
    """Shared by all calls with the same credential (else the same upstream)."""
    cluster: BucketConfig | None = None
    max_calls_per_episode: int = Field(default=512, gt=0)
    """Counts every call, in every mode."""
    max_wait_s: float = Field(default=10.0, ge=0)
    """A call waits this long for a token, then it is refused."""
    spend_per_episode: float | None = Field(default=None, gt=0)
    spend_cluster: float | None = Field(default=None, gt=0)


class BoxesConfig(ConfigModel):
    """The boxes of simulators and MCP servers over stdio; sizes are of one program."""

    unsafe_local: bool = False
    """Run them on the host, without any isolation: only for code you would run yourself."""
    level: Literal["auto", "A", "B"] = "auto"
    memory_mib: int = Field(default=512, ge=32)
    disk_mib: int = Field(default=64, ge=1)
    """Of /tmp, the only writable place."""
    cpus: float = Field(default=1.0, gt=0)
    max_processes: int = Field(default=256, ge=4)
    """Threads count."""
    max_open_files: int = Field(default=1024, ge=16)
    show: tuple[Path, ...] = ()
    """More of the host, read-only at the same place, for MCP servers."""


class ProxyConfig(ConfigModel):
    """The proxy of one node."""

    state_dir: Path
    """Audit log, journal, idempotency key; one directory per node."""
    agent_socket: Path | None = None
    """Default: state_dir/agent.sock; the only thing a sandbox gets, beside its token."""
    control_socket: Path | None = None
    """Default: state_dir/control.sock, mode 0600; opens episodes."""
    loopback_port: int | None = Field(default=None, ge=0, le=65535)
    """Agent door on 127.0.0.1 too; 0 = any free port."""
    default_mode: Mode = "replay"
    kill_switch: bool = False
    """Forces every tool to replay or simulate."""
    kill_switch_file: Path | None = None
    """While it exists the switch is on; on a shared file system it works for the whole cluster."""
    canary: bool = False
    """Append a per-episode canary line to results and watch for it in arguments."""
    replay_latency: Literal["none", "recorded"] = "none"
    worlds: dict[str, WorldConfig] = Field(default_factory=dict)
    secrets: dict[str, SecretConfig] = Field(default_factory=dict)
    network: NetworkConfig = NetworkConfig()
    boxes: BoxesConfig = BoxesConfig()
    limits: LimitsConfig = LimitsConfig()
    retry: RetryConfig = RetryConfig()
    quotas: QuotaConfig = QuotaConfig()

    @property
    def agent_path(self) -> Path:
        return self.agent_socket or self.state_dir / "agent.sock"

    @property
    def control_path(self) -> Path:
        return self.control_socket or self.state_dir / "control.sock"
