"""EpisodeContext: the client's side of one engine context, which it can rebuild at any time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np

from engine.errors import CapacityError, ContextLost, ContextTooLong
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextId, ContextPolicy, Sampling, StepRequest, StepResult
from parl.errors import StaleWeights
from parl.rollout.settings import RolloutSettings
from parl.rollout.waits import Waits


class Deadline:
    """End of one attempt, on the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    def within(self, timeout_s: float) -> float:
        """Seconds that a wait may take: ``timeout_s`` or what is left, never negative."""
        return max(0.0, min(timeout_s, self._end - time.monotonic()))

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


class EpisodeContext:
    """Remembers every token, so a dead engine costs a prefill and not the episode.

    The draw depends only on the position, hence a repeated step samples the same tokens from the
    same weights; other weights raise StaleWeights. What a rebuilt context reports once more
    (experts, selections, codes) is cut off, so that the ledger's reports stay gapless.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        policy: ContextPolicy,
        prompt_ids: np.ndarray,
        *,
        owner: str,
        waits: Waits,
        settings: RolloutSettings,
        deadline: Deadline,
        parent: ContextId | None = None,
        weight_version: int = -1,
    ) -> None:
        self._runtime = runtime
        self._policy = policy
        self._tokens: list[int] = [int(token) for token in prompt_ids]
        self._unsent: list[int] = []
        self._owner = owner
        self._waits = waits
        self._settings = settings
        self._deadline = deadline
        self._parent = parent
        self._weight_version = weight_version
        self._ctx: ContextId | None = None
        self._stepping = False
        self._num_reported = 0
        self._next_block = 1
        self.num_rebuilds = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token_ids: np.ndarray) -> None:
        """Add observed tokens; they reach the engine with the next step."""
        new = [int(token) for token in token_ids]
        self._tokens += new
        self._unsent += new

    async def step(
        self, max_new_tokens: int, sampling: Sampling, stop_ids: tuple[int, ...]
    ) -> StepResult:
        """One turn. ContextLost after ``max_rebuilds`` rebuilds in a row, StaleWeights,
        WaitTimeout."""
        for rebuild in range(self._settings.max_rebuilds + 1):
            try:
                result = await self._try_step(max_new_tokens, sampling, stop_ids)
                break
            except ContextLost:
                self._ctx, self._parent = None, None
                if rebuild == self._settings.max_rebuilds:
                    raise
                self.num_rebuilds += 1
                # an engine actor needs a moment to come back; every waiting episode knocks here
                await asyncio.sleep(self._deadline.within(self._settings.backoff_s * 2**rebuild))
        self._check_version(result.weight_version)
        self._tokens += result.token_ids.tolist()
        return self._without_repeats(result)

    async def _try_step(
        self, max_new_tokens: int, sampling: Sampling, stop_ids: tuple[int, ...]
    ) -> StepResult:
        if self._ctx is None:
            self._ctx = await self._open()
        elif self._unsent:
            async with self._wait("engine.append"):
                await self._runtime.append(self._ctx, self._unsent)
        self._unsent = []
        request = StepRequest(self._ctx, max_new_tokens, sampling, stop_ids)
        self._stepping = True
        async with self._wait("engine.forward_step"):
            result = await self._runtime.forward_step(request)
        self._stepping = False
        return result

    async def _open(self) -> ContextId:
        """A context with all tokens so far; waits while the engine has no room for another."""
        pause_s = self._settings.backoff_s
        async with self._wait("engine.room"):
            while True:
                try:
                    return await self._open_now()
                except ContextTooLong:
                    raise
                except CapacityError:
                    # others hold the slots or blocks, and give them back when their episodes end
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 1.0)

    async def _open_now(self) -> ContextId:
        if self._parent is not None and not self._num_reported and not self._unsent:
            return await self._runtime.fork(self._parent, self._policy)
        return await self._runtime.init_context(self._tokens, self._policy)

    def _wait(self, what: str):
        timeout_s = self._deadline.within(self._settings.step_timeout_s)
        return self._waits.on(self._owner, what, timeout_s)

    def _check_version(self, version: int) -> None:
        if self._weight_version < 0:
            self._weight_version = version
        if version != self._weight_version:
            raise StaleWeights(
                f"{self._owner}: the engine serves weight version {version}, the episode needs "
                f"{self._weight_version}; publish that version to every engine"
            )

    def _without_repeats(self, result: StepResult) -> StepResult:
        """A rebuilt context reports its first positions once more."""
        reports = [r for r in (result.experts, result.selections) if r is not None]
        if not reports:
            return result
        repeated = self._num_reported - result.experts_start
        assert repeated >= 0, (
            f"{self._owner}: experts reported from position {result.experts_start}, "
            f"expected at most {self._num_reported}"
        )
        start = self._num_reported
        self._num_reported += len(reports[0]) - repeated
        return replace(
            self._without_old_codes(result),
            experts=None if result.experts is None else result.experts[repeated:],
            experts_start=start,
            selections=None if result.selections is None else result.selections[repeated:],
        )

    def _without_old_codes(self, result: StepResult) -> StepResult:
        if result.codes is None:
            return result
        start = self._next_block
        repeated = start - result.codes_start
        assert repeated >= 0, (
            f"{self._owner}: codes reported from block {result.codes_start}, expected at most "
            f"{start}"
        )
        codes = result.codes[repeated:]
        self._next_block += len(codes)
        return replace(result, codes=codes, codes_start=start)

    async def release(self) -> None:
        """Give the context back; stops a step that still runs. Idempotent."""
        ctx, self._ctx = self._ctx, None
        if ctx is None:
            return
        async with self._waits.on(self._owner, "engine.release", self._settings.release_timeout_s):
            if self._stepping:
                await self._runtime.cancel(ctx)
            await self._runtime.release(ctx)
