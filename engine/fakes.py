"""ScriptedRuntime: an engine that says what it is told to, for tests of everything above it.

Honest where it matters: contexts, states, capacity, positions, expert reports and errors are those
of MRI (it passes engine.runtime.conformance); only the policy is a script instead of a model.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import CapacityError, ContextLost, InvalidStateError, NotSupportedError
from engine.runtime.protocol import MRI_VERSION
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    DrawKey,
    EngineInfo,
    EvictResult,
    EvictSelector,
    FinishReason,
    KVSummary,
    Sampling,
    StepRequest,
    StepResult,
    WeightSet,
)
from engine.runtime.weights import verify_weight_set

Script = Callable[[Sequence[int], DrawKey | None], int]
"""(all tokens of the context, its draw key) -> the next token id. A pure function, like a draw."""

_BYTES_PER_TOKEN = 4


def replay(sequence: Sequence[int], filler: int = 0) -> Script:
    """Says what a recorded context says: ``sequence`` is all of it (prompt, turns, observations),
    and the next token is the one at this position. Past its end, ``filler``."""
    recorded = tuple(sequence)

    def script(tokens: Sequence[int], draw: DrawKey | None) -> int:
        return recorded[len(tokens)] if len(tokens) < len(recorded) else filler

    return script


@dataclass(slots=True)
class _Scripted:
    tokens: list[int]
    policy: ContextPolicy
    num_held: int = 0
    reported: int = 0
    running: bool = False
    stepped: bool = False
    cancelled: bool = False


class ScriptedRuntime:
    """ModelRuntime on the caller's event loop; every sampled token has logprob ``logprob``.

    It yields to the loop after each token, so that cancel and overlapping calls can happen.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int = 512,
        max_context: int = 512,
        max_contexts: int = 1024,
        num_moe_layers: int = 1,
        top_k: int = 2,
        logprob: float = -1.0,
    ) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._max_contexts = max_contexts
        self._experts_shape = (num_moe_layers, top_k)
        self._logprob = logprob
        self._contexts: dict[ContextId, _Scripted] = {}
        self._version = 0
        self._checksum = ""

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        self._no_media(media)
        tokens = [int(token) for token in token_ids]
        if not tokens:
            raise InvalidStateError("init_context got no tokens, expected at least one")
        self._check(tokens, len(tokens))
        if len(self._contexts) >= self._max_contexts:
            raise CapacityError(
                f"{self._max_contexts} contexts are open, the most allowed; release some"
            )
        ctx = ContextId(uuid.uuid4().hex)
        self._contexts[ctx] = _Scripted(tokens, policy)
        return ctx

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        self._no_media(media)
        context = self._idle(ctx, "append")
        tokens = [int(token) for token in token_ids]
        self._check(tokens, len(context.tokens) + len(tokens))
        context.tokens += tokens

    async def forward_step(self, request: StepRequest) -> StepResult:
        context = self._idle(request.ctx, "forward_step")
        if request.max_new_tokens < 1:
            raise InvalidStateError(f"max_new_tokens={request.max_new_tokens}, expected at least 1")
        _check_plain(request)
        start = len(context.tokens)
        if start >= self._max_context:
            raise CapacityError(
                f"context holds {start} tokens, max_context is {self._max_context}: no room"
            )
        context.running, context.cancelled, context.stepped = True, False, True
        try:
            finish = await self._speak(context, request, start)
        finally:
            context.running = False
        sampled = np.array(context.tokens[start:], np.int32)
        context.num_held = len(context.tokens) - 1
        return StepResult(
            sampled,
            np.full(len(sampled), self._logprob, np.float32),
            finish,
            self._version,
            start,
            *self._report(context),
        )

    async def _speak(self, context: _Scripted, request: StepRequest, start: int) -> FinishReason:
        while not context.cancelled:
            token = self._script(context.tokens, context.policy.draw)
            self._check([token], len(context.tokens) + 1)
            context.tokens.append(token)
            if token in request.stop_ids:
                return "stop"
            length = len(context.tokens)
            if length - start >= request.max_new_tokens or length >= self._max_context:
                return "length"
            await asyncio.sleep(0)
        return "cancelled"

    def _report(self, context: _Scripted) -> tuple[np.ndarray | None, int]:
        """Experts by position: layer l sends position p to experts (p + l + k) mod 4."""
        if not self._experts_shape[0]:
            return None, 0
        start, end = context.reported, max(context.reported, len(context.tokens) - 1)
        context.reported = end
        layers, top_k = self._experts_shape
        positions = np.arange(start, end)[:, None, None]
        route = positions + np.arange(layers)[:, None] + np.arange(top_k)
        return (route % 4).astype(np.int16), start

    async def cancel(self, ctx: ContextId) -> None:
        context = self._contexts.get(ctx)
        if context is not None:
            context.cancelled = True

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        context = self._idle(ctx, "get_kv_summary")
        if context.stepped:
            raise InvalidStateError(
                f"get_kv_summary: context {ctx} has stepped; ask after init_context, fork or "
                "evict_kv"
            )
        held = context.num_held
        return KVSummary(len(context.tokens), held, 0, 0, held * _BYTES_PER_TOKEN)

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        context = self._idle(ctx, "evict_kv")
        if selector.to == "cold":
            raise NotSupportedError("evict_kv to 'cold': this engine has no cold KV")
        if not 0 <= selector.start <= selector.end <= len(context.tokens):
            raise InvalidStateError(
                f"evict_kv [{selector.start}, {selector.end}) of a context of "
                f"{len(context.tokens)} tokens; expected 0 <= start <= end <= length"
            )
        context.stepped = False
        # as an engine whose cache has no gaps: all from there on
        gone = max(0, context.num_held - selector.start) if selector.end > selector.start else 0
        context.num_held -= gone
        evicted = ((selector.start, selector.start + gone),) if gone else ()
        return EvictResult(evicted, gone * _BYTES_PER_TOKEN)

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        parent = self._idle(ctx, "fork")
        child = await self.init_context(parent.tokens, policy or parent.policy)
        self._contexts[child].num_held = parent.num_held
        return child

    async def release(self, ctx: ContextId) -> None:
        context = self._contexts.pop(ctx, None)
        if context is not None:
            context.cancelled = True

    async def load_weights(self, weights: WeightSet) -> int:
        """Only the name of the policy changes."""
        verify_weight_set(weights)
        self._version, self._checksum = weights.manifest.version, weights.manifest.checksum
        return self._version

    async def info(self) -> EngineInfo:
        held = sum(context.num_held for context in self._contexts.values())
        return EngineInfo(
            engine="scripted",
            mri_version=MRI_VERSION,
            weight_version=self._version,
            weight_checksum=self._checksum,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            capabilities=frozenset(
                {"logprobs", "experts", "fork", "evict", "kv_summary", "draws", "deterministic"}
            ),
            num_contexts=len(self._contexts),
            kv_bytes_used=held * _BYTES_PER_TOKEN,
            kv_bytes_total=self._max_contexts * self._max_context * _BYTES_PER_TOKEN,
        )

    def lose_contexts(self) -> None:
        """What a restart of the engine does."""
        for context in self._contexts.values():
            context.cancelled = True
        self._contexts.clear()

    def _idle(self, ctx: ContextId, action: str) -> _Scripted:
        context = self._contexts.get(ctx)
        if context is None:
            raise ContextLost(f"{action}: context {ctx} is unknown; rebuild it with init_context")
        if context.running:
            raise InvalidStateError(f"{action}: context {ctx} is running a step; await it first")
        return context

    def _check(self, tokens: list[int], length: int) -> None:
        if length > self._max_context:
            raise CapacityError(f"{length} tokens exceed max_context={self._max_context}")
        bad = [t for t in tokens if not 0 <= t < self._vocab_size]
        if bad:
            raise InvalidStateError(
                f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}"
            )

    def _no_media(self, media: Sequence[Any]) -> None:
        if media:
            raise NotSupportedError(f"{len(media)} media items; this engine serves text only")


def _check_plain(request: StepRequest) -> None:
    """A script has no distribution to shape; temperature and truncation change nothing it says."""
    sampling = request.sampling
    plain = StepRequest(
        request.ctx,
        request.max_new_tokens,
        Sampling(sampling.temperature, sampling.top_p, sampling.top_k),
        request.stop_ids,
    )
    if request != plain:
        raise NotSupportedError(f"{request}: a script takes max_new_tokens and stop_ids only")
