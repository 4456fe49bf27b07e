"""connect and shutdown: one Ray cluster for this process, local or given.

``shutdown`` ends what ``connect`` started here and disconnects from what it did not. It never runs
`ray stop`, which would end every Ray process of the machine.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from infra.cluster.auth import HINT, use_token
from infra.cluster.config import ClusterConfig
from infra.errors import ClusterError

_START = "start a head node there with `ray start --head` or correct the address"


@dataclass(frozen=True, slots=True)
class ClusterHandle:
    """The cluster this process is connected to."""

    address: str
    """host:port of its GCS."""
    is_local: bool
    """Started by ``connect``: it ends with this process and never grows."""
    was_connected: bool = False
    """Somebody else connected this process before; ``shutdown`` leaves that alone."""

    @property
    def resources(self) -> Mapping[str, float]:
        """What all nodes offer together: CPU, GPU, memory (bytes), custom ones."""
        return ray.cluster_resources()

    def shutdown(self) -> None:
        """Disconnect; a local cluster ends. Twice is fine."""
        if not self.was_connected:
            shutdown()


def connect(config: ClusterConfig | None = None) -> ClusterHandle:
    """Connect this process to a cluster, or start a local one.

    ClusterError: nobody answers at the address, wrong token, another Ray version, no room in
    temp_dir. ConfigError: the token file does not exist.
    """
    config = config or ClusterConfig()
    if ray.is_initialized():
        context = ray.get_runtime_context()
        return ClusterHandle(context.gcs_address, is_local=False, was_connected=True)
    use_token(config.auth_token_path)
    # a training machine without internet must not wait for a statistics server
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    if address and ":" in address and "://" not in address:
        _check_listener(address, config.connect_timeout_s)
    options = {} if address else _local_options(config)
    try:
        ray.init(
            address=address or "local",
            logging_level=logging.ERROR,
            log_to_driver=config.log_to_driver,
            runtime_env={"env_vars": dict(config.env_vars)},
            **options,
        )
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        shutdown()
        raise ClusterError(_explain(error, address)) from error
    gcs_address = ray.get_runtime_context().gcs_address
    return ClusterHandle(gcs_address, is_local=not address)


def shutdown() -> None:
    """Disconnect this process; a cluster that ``connect`` started ends. Twice is fine."""
    ray.shutdown()


def _local_options(config: ClusterConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"include_dashboard": config.include_dashboard}
    if config.num_cpus is not None:
        options["num_cpus"] = config.num_cpus
    if config.num_gpus is not None:
        options["num_gpus"] = config.num_gpus
    if config.temp_dir:
        options["_temp_dir"] = config.temp_dir
    if config.object_store_mib is not None:
        options["object_store_memory"] = config.object_store_mib << 20
    return options


def _check_listener(address: str, timeout_s: float) -> None:
    """Ray itself would try for a minute and then abort the process."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ClusterError(f"Ray address {address!r}: expected host:port, auto or ray://host:port")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"no Ray head node answers at {address} ({error}); {_START}") from error


def _explain(error: Exception, address: str) -> str:
    where = f"Ray at {address}" if address else "a local Ray cluster"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, AuthenticationError):
        return f"{where} refuses our token ({lines[0]}); {HINT}"
    if isinstance(error, ConnectionError):
        # something listened there a moment ago: most often a head whose token we did not show
        return (
            f"no Ray head node answers at {address or 'local'} ({lines[0]}); {_START}. A head in "
            f"token mode ignores callers without its token: {HINT}"
        )
    if "AF_UNIX" in str(error):
        return f"{where}: temp_dir is too long for unix sockets ({lines[0]}); give a shorter one"
    return f"cannot connect to {where}: {lines[0]}"
