"""Bounded retries; a call whose reply was lost is sent again only if it may be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from sandbox.proxy.config import RetryConfig
from sandbox.proxy.errors import CallFailure, OutcomeUnknown, SharedQuota, Transient
from sandbox.proxy.result import Reply

Sleep = Callable[[float], Awaitable[None]]


async def with_retries(
    attempt: Callable[[], Awaitable[Reply]],
    config: RetryConfig,
    *,
    reads: bool,
    repeatable: bool,
    admit: Callable[[], Awaitable[None]] | None = None,
    sleep: Sleep = asyncio.sleep,
) -> Reply:
    """The first reply of at most ``max_attempts`` attempts.

    ``repeatable``: the call may be sent again though it may have taken effect. ``reads``: it has no
    effect to be unsure about. ``admit`` is asked before each further attempt; when it raises
    SharedQuota there is none. Raises what the last attempt became: RateLimited, UpstreamFailed,
    Unreachable ...; OutcomeUnknown as soon as a reply is lost that may not be asked for again, and
    at the end for a repeatable call that has effects.
    """
    maybe_applied = False
    for number in range(config.max_attempts):
        try:
            return await attempt()
        except Transient as transient:
            maybe_applied = maybe_applied or transient.applied
            if transient.applied and not repeatable:
                raise _unknown(transient) from None
            last = _unknown(transient) if maybe_applied and not reads else transient.failure
            wait_s = _wait_s(transient, number, config)
            if wait_s is None or number + 1 == config.max_attempts:
                raise last from None
        await sleep(wait_s)
        if admit is not None:
            try:
                await admit()
            except SharedQuota:
                raise last from None
    raise AssertionError("max_attempts is at least 1")


def _wait_s(transient: Transient, number: int, config: RetryConfig) -> float | None:
    """Pause before the next attempt; None when the upstream wants a longer one than is allowed."""
    if transient.retry_after_s is not None:
        wait_s = transient.retry_after_s
        return None if wait_s > config.max_retry_after_s else wait_s
    # spread out: a thousand episodes meet the same failure at once
    return min(config.backoff_s * 2**number, config.max_retry_after_s) * random.uniform(0.5, 1.0)


def _unknown(transient: Transient) -> CallFailure:
    return OutcomeUnknown(
        f"{transient.failure}; the call may have taken effect: look before repeating it",
        transient.status,
    )
