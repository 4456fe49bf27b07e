"""TransformersRuntime: MRI over a transformers model, as plainly as it can be said.

The reference that faster engines are compared with: one context at a time, one token a forward,
``DynamicCache``. Sampling is LightEngine's, so equal logits give equal tokens.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from engine.adapters.contexts import Made, TokenContext, TokenContexts, new_id, seed_key
from engine.adapters.hub_weights import check_set, set_tensors
from engine.chat.vocabulary import Vocabulary
from engine.errors import ContextLost, EngineError, InvalidStateError
from engine.light.draws import uniforms
from engine.light.sampler import RowRules, draw, has_penalties
from engine.runtime.protocol import MRI_VERSION
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    DrawKey,
    EngineInfo,
    EvictResult,
    EvictSelector,
    KVSummary,
    StepDelta,
    StepRequest,
    StepResult,
    WeightSet,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
BLOCK = 32
"""Evictions are rounded to it, as elsewhere; the cache itself knows no blocks."""
_CAPABILITIES = {
    "logprobs", "fork", "evict", "kv_summary", "draws", "stream", "sampling", "deadline",
}  # fmt: skip


class TransformersRuntime:
    """ModelRuntime and Streaming; the model runs on one thread. ``close`` ends it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_context: int,
        max_contexts: int = 64,
        vocabulary: Vocabulary | None = None,
        weight_version: int = 0,
        seed: int = 0,
    ) -> None:
        """``weight_version``: what the tensors that ``model`` came with are called; -1 = they are
        random, refuse to step until ``load_weights``."""
        self._model = model.eval()
        self._vocabulary = vocabulary
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._version, self._checksum = weight_version, ""
        self._seed, self._num_unseeded = seed, 0
        self._contexts = TokenContexts(
            "transformers", self._vocab_size, max_context, max_contexts, vocabulary is not None
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="transformers-runtime")
        self._closed = False
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed it between 5.16 and 5.24
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def load(cls, folder: Path, *, max_context: int, **options: Any) -> TransformersRuntime:
        """A hub folder of any type that transformers or this repository reads, in fp32."""
        from transformers import AutoModelForCausalLM

        from engine.model.auto import register_modules

        register_modules()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(model, max_context=max_context, **options)

    # -- MRI ------------------------------------------------------------------------------------

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        return self._contexts.open(token_ids, policy, media)

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        self._contexts.append(ctx, token_ids, media)

    async def forward_step(self, request: StepRequest) -> StepResult:
        context = self._begin(request)
        begun = time.monotonic()
        return await self._on_worker(context, lambda: self._step(context, request, begun, None))

    async def stream_step(self, request: StepRequest) -> AsyncIterator[StepDelta | StepResult]:
        context = self._begin(request)
        begun = time.monotonic()
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[StepDelta | None] = asyncio.Queue()

        def emit(delta: StepDelta | None) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, delta)

        def run() -> StepResult:
            try:
                return self._step(context, request, begun, emit)
            finally:
                emit(None)

        running = asyncio.ensure_future(self._on_worker(context, run))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            yield await running
        finally:
            context.cancelled = True
            await asyncio.gather(running, return_exceptions=True)

    async def cancel(self, ctx: ContextId) -> None:
        context = self._contexts.get(ctx)
        if context is not None:
            context.cancelled = True

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        with self._contexts.lock:
            context = self._contexts.idle(ctx, "get_kv_summary")
            return KVSummary(len(context.tokens), context.held, 0, 0, _cache_bytes(context.cache))

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        """A cache can be cut off at the end only: all from the first block of ``selector`` on."""
        self._contexts.refuse(
            selector.to != "absent", f"evict_kv to {selector.to!r}; its KV has no tiers"
        )
        with self._contexts.lock:
            context = self._contexts.idle(ctx, "evict_kv")
            if not 0 <= selector.start <= selector.end <= len(context.tokens):
                raise InvalidStateError(
                    f"evict_kv [{selector.start}, {selector.end}) of a context of "
                    f"{len(context.tokens)} tokens; expected 0 <= start <= end <= length"
                )
            context.stepped = False
            start, held = selector.start - selector.start % BLOCK, context.held
            if selector.start == selector.end or start >= held:
                return EvictResult((), 0)
            before = _cache_bytes(context.cache)
            _cut(context, start)
            return EvictResult(((start, held),), before - _cache_bytes(context.cache))

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        with self._contexts.lock:
            parent = self._contexts.idle(ctx, "fork")
            child = replace(
                parent,
                id=new_id(),
                policy=policy or parent.policy,
                tokens=list(parent.tokens),
                sampled=list(parent.sampled),
                cache=copy.deepcopy(parent.cache),
                stepped=False,
            )
        return self._contexts.add(child)

    async def release(self, ctx: ContextId) -> None:
        self._contexts.close(ctx)

    async def load_weights(self, weights: WeightSet) -> int:
        """Between two steps; those that asked earlier end under the old ones."""
        await asyncio.to_thread(check_set, self._model, weights)

        def swap() -> int:
            set_tensors(self._model, weights)
            self._version = weights.manifest.version
            self._checksum = weights.manifest.checksum
            for context in self._contexts.all():
                _cut(context, 0)
            return self._version

        return await asyncio.wrap_future(self._submit(swap))

    async def info(self) -> EngineInfo:
        held = [_cache_bytes(context.cache) for context in self._contexts.all()]
        has_text = {"stop_texts"} if self._vocabulary is not None else set()
        return EngineInfo(
            engine="transformers",
            mri_version=MRI_VERSION,
            weight_version=self._version,
            weight_checksum=self._checksum,
            max_context=self._contexts.max_context,
            vocab_size=self._vocab_size,
            capabilities=frozenset(_CAPABILITIES | has_text),
            num_contexts=len(self._contexts),
            kv_bytes_used=sum(held),
        )

    def close(self) -> None:
        """Running steps end with finish="cancelled". Idempotent."""
        self._closed = True
        for context in self._contexts.all():
            context.cancelled = True
        self._worker.shutdown(wait=True)

    # -- one step, on the worker ----------------------------------------------------------------

    @torch.inference_mode()
    def _step(
        self,
        context: TokenContext,
        request: StepRequest,
        begun: float,
        emit: Callable[[StepDelta | None], None] | None,
    ) -> StepResult:
        start, said = len(context.tokens), len(context.sampled)
        made = Made()
        try:
            while not made.finish:
                if context.cancelled:
                    made.finish = "cancelled"
                elif request.deadline_s is not None and (
                    time.monotonic() >= begun + request.deadline_s
                ):
                    made.finish = "deadline"
                else:
                    self._token(context, request, made)
                    if emit is not None:
                        emit(made.delta(-1))
        except BaseException:
            del context.tokens[start:], context.sampled[said:]
            _cut(context, min(context.held, start - 1))
            raise
        whole = made.delta(0)
        return StepResult(
            whole.token_ids,
            whole.logprobs,
            made.finish,
            self._version,
            start,
            top_ids=whole.top_ids,
            top_logprobs=whole.top_logprobs,
            stop_text=made.stop_text,
        )

    def _token(self, context: TokenContext, request: StepRequest, made: Made) -> None:
        """Sample one token and see whether it ends the step."""
        logits = self._logits(context)
        params = request.sampling
        rules = RowRules(num_logprobs=request.num_logprobs)
        if has_penalties(params):
            rules.counts = np.bincount(context.sampled, minlength=self._vocab_size)
            rules.seen = np.zeros(self._vocab_size, bool)
            rules.seen[context.tokens] = True
        key = self._key(context, request)
        u = uniforms([key], [len(context.tokens)])
        drawn = draw(logits, u, [params], [rules])
        token = int(drawn.ids[0])
        context.tokens.append(token)
        context.sampled.append(token)
        made.ids.append(token)
        made.logprobs.append(float(drawn.logprobs[0]))
        if drawn.tops[0] is not None:
            made.tops.append(drawn.tops[0])
        if request.stop_texts and self._vocabulary is not None:
            made.text += self._vocabulary.bytes_of(token)
            made.stop_text = next((t for t in request.stop_texts if t.encode() in made.text), None)
        if token in request.stop_ids or made.stop_text is not None:
            made.finish = "stop"
        elif (
            len(made.ids) >= request.max_new_tokens
            or len(context.tokens) >= self._contexts.max_context
        ):
            made.finish = "length"

    def _logits(self, context: TokenContext) -> np.ndarray:
        """float32 [1, V] after all tokens of ``context``; what is missing in its cache is fed."""
        from transformers import DynamicCache

        if context.cache is None:
            context.cache, context.held = DynamicCache(), 0
        ids = torch.tensor([context.tokens[context.held :]], device=self._model.device)
        options: dict[str, Any] = {self._cache_name: context.cache}
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **options)
        context.held = len(context.tokens)
        logits = output.logits[0, -1:].float().cpu().numpy()
        if not np.isfinite(logits).all():
            raise EngineError(
                f"context {context.id}: weight version {self._version} computed NaN or infinity; "
                "publish an earlier version"
            )
        return logits

    def _key(self, context: TokenContext, request: StepRequest) -> DrawKey:
        if context.policy.draw is not None:
            return context.policy.draw
        if request.sampling.seed is not None:
            return seed_key(request.sampling.seed)
        self._num_unseeded += 1
        return DrawKey(self._seed, task=self._num_unseeded & 0xFFFFFFFF, stream=0xFFFF)

    # -- calls ----------------------------------------------------------------------------------

    def _begin(self, request: StepRequest) -> TokenContext:
        if self._version < 0:
            raise EngineError("this engine has no weights yet; call load_weights before a step")
        return self._contexts.begin_step(request)

    async def _on_worker(self, context: TokenContext, call: Callable[[], T]) -> T:
        """The context is idle again when ``call`` has ended, not when its caller left."""

        def run() -> T:
            try:
                return call()
            finally:
                context.busy = ""

        future = self._submit(run)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            context.cancelled = True
            raise

    def _submit(self, call: Callable[[], T]) -> Any:
        if self._closed:
            raise ContextLost("this engine was closed; start a new one and rebuild the context")
        return self._worker.submit(call)


def _cut(context: TokenContext, length: int) -> None:
    """Keep the keys and values of the first ``length`` tokens."""
    if context.cache is not None and length < context.held:
        if length:
            context.cache.crop(length)
        else:
            context.cache = None
        context.held = length


def _cache_bytes(cache: Any) -> int:
    if cache is None:
        return 0
    tensors = (t for layer in cache.layers for t in (layer.keys, layer.values))
    return sum(t.nbytes for t in tensors if t is not None)
