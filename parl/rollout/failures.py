"""Which part of the infrastructure failed an episode: what the ledger and the metrics count by.

Such an episode has the outcome infra_error and no reward. Worlds that cannot be set up and
verifiers without a verdict have outcomes of their own (env_error, verifier_error).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import StrEnum

from engine.errors import EngineError
from parl.errors import StaleWeights, WaitTimeout
from sandbox.errors import ProxyLost, SandboxError


class Failure(StrEnum):
    """One kind for each thing that somebody would have to repair."""

    ENGINE = "engine"
    """Down, hanging, full, or serving other weights than the episode began with."""
    SANDBOX = "sandbox"
    """The box died, did not start or does not answer."""
    PROXY = "proxy"
    """The node's tool proxy is gone, or the MCP server or simulator it needs."""
    API = "api"
    """The upstreams of tools failed again and again: 5xx, 429, no connection."""
    DISK = "disk"
    """A file system of ours is full."""
    INTERNAL = "internal"
    """A bug of ours, or something nobody expected."""


_DISK = (errno.ENOSPC, errno.EDQUOT)
_UNRECORDED = "infra_error: record_"
"""How the proxy says that it could not write what must be written (``sandbox.proxy.errors``)."""


def failure_of(error: BaseException) -> Failure:
    """The kind of an exception that ended an attempt."""
    if any(isinstance(e, OSError) and e.errno in _DISK for e in _chain(error)):
        return Failure.DISK
    if isinstance(error, ProxyLost):
        return Failure.PROXY
    if isinstance(error, SandboxError):
        return Failure.SANDBOX
    if isinstance(error, EngineError | StaleWeights):
        return Failure.ENGINE
    if isinstance(error, WaitTimeout):
        owner = error.what.partition(".")[0]
        return {"engine": Failure.ENGINE, "sandbox": Failure.SANDBOX}.get(owner, Failure.INTERNAL)
    return Failure.INTERNAL


def failure_of_calls(text: str) -> Failure:
    """The kind of an episode that its session ended after many failed calls; ``text`` = the last
    answer."""
    return Failure.DISK if text.startswith(_UNRECORDED) else Failure.API


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
