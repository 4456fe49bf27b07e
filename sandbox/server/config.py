"""Settings of the sandbox server."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from sandbox.config import SandboxConfig

MIN_TOKEN_CHARS = 16


class ServerConfig(BaseModel):
    """What one server may do; every wait in it has one of these deadlines or one of the task's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_sessions: int = Field(default=64, ge=1)
    """Sessions at once; one more is refused with 503."""
    num_verifiers: int = Field(default=2, ge=1)
    """Verifier boxes per task bundle."""
    ttl_s: float = Field(default=600.0, ge=1.0)
    """A session whose client is silent for longer is closed."""
    max_ttl_s: float = Field(default=86400.0, ge=1.0)
    """Most that a client may ask for."""
    create_timeout_s: float = Field(default=60.0, gt=0)
    close_timeout_s: float = Field(default=30.0, gt=0)
    """How long a client waits for a close; the close itself goes on."""
    queue_timeout_s: float = Field(default=120.0, gt=0)
    """How long a call waits for the earlier calls of its session."""
    max_queued_calls: int = Field(default=32, ge=1)
    max_body_bytes: int = Field(default=1 << 20, ge=1024)
    body_timeout_s: float = Field(default=30.0, gt=0)
    shutdown_timeout_s: float = Field(default=5.0, gt=0)
    """How long requests in flight may go on after SIGTERM."""
    lease_ttl_s: float = Field(default=600.0, ge=10.0)
    pool_idle_s: float = Field(default=120.0, gt=0)
    """Boxes of a task bundle that nobody uses are given up after this long."""
    num_remembered: int = Field(default=1000, ge=0)
    """Closed sessions that can still be inspected."""
    task_roots: tuple[Path, ...] = ()
    """Folders whose sub-folders are tasks that may be asked for by name."""
    allow_uncertified: bool = False
    sandbox: SandboxConfig = SandboxConfig()
