"""How this process gets a Ray cluster."""

from __future__ import annotations

from pydantic import Field

from infra.config import ConfigModel

THREAD_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}
"""Many small worker processes share the cores: one thread each, and idle ones do not spin."""


class ClusterConfig(ConfigModel):
    address: str = ""
    """Empty = the cluster of RAY_ADDRESS (inside a Ray job), else a new local one; "auto" = the
    head node of this machine; "host:port" = its GCS; "ray://host:10001" = Ray Client."""
    num_cpus: float | None = Field(default=None, gt=0)
    """CPUs a local cluster offers; None = those of the machine. May exceed them."""
    num_gpus: float | None = Field(default=None, ge=0)
    temp_dir: str = ""
    """Session folder of a local cluster; short, for unix sockets in it may have 107 bytes."""
    object_store_mib: int | None = Field(default=None, ge=80)
    include_dashboard: bool = False
    log_to_driver: bool = False
    """Copy stdout and stderr of workers to this terminal."""
    env_vars: dict[str, str] = THREAD_ENV
    """Environment of every worker process of this job."""
    auth_token_path: str = ""
    """File with the cluster's token; empty = RAY_AUTH_* of the environment, else Ray's default."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
