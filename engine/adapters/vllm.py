"""VllmRuntime: MRI over vLLM (AsyncLLM, the CPU build 0.32), an environment of its own.

A context is its tokens; vLLM's prefix cache is what makes the next step cheap, so get_kv_summary
and evict_kv of one context have no equivalent there and are declined. Weights change in place by
the one order that is safe (facts/vllm-fit.md 2.3): validate, pause, update, fix-ups of the CPU
build, reset the prefix cache, probe against a reference forward, resume; what fails after the
update began poisons the engine, which is then started again with the weights it had.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from engine.adapters.contexts import Made, TokenContext, TokenContexts, new_id, seed_key
from engine.adapters.hub_weights import check_shapes
from engine.adapters.loop_thread import LoopThread
from engine.adapters.vllm_launch import VllmOptions, check_version, start_vllm, write_shared
from engine.chat.vocabulary import Vocabulary
from engine.errors import ContextLost, EngineError, NotSupportedError, WeightsError
from engine.light.sampler import Alternatives
from engine.runtime.protocol import MRI_VERSION
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EngineInfo,
    EvictResult,
    EvictSelector,
    KVSummary,
    StepDelta,
    StepRequest,
    StepResult,
    WeightSet,
)

log = structlog.get_logger(__name__)
Reference = Callable[[WeightSet, Sequence[int]], np.ndarray]
"""(weights, n token ids) -> float32 [n - 1], the logprob of each token but the first."""
PROBE = (1, 2, 3, 5, 8, 13, 21, 34, 2, 1, 3, 1)
PROBE_LIMIT = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |logprob - reference| that passes: bf16 alone moves it by 0.03."""
_CAPABILITIES = frozenset(
    {"logprobs", "fork", "draws", "stream", "sampling", "deadline", "prefix_cache"}
)


class VllmRuntime:
    """ModelRuntime and Streaming. vLLM lives in subprocesses; ``close`` ends them."""

    def __init__(
        self,
        folder: Path,
        options: VllmOptions | None = None,
        *,
        reference: Reference | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """``folder``: a hub folder (Llama, Qwen3, DeepseekV3 layouts). ``reference``: what the
        probe is compared with; None = our own model in this process."""
        from engine.model.checkpoint.load import open_checkpoint

        check_version()
        self.options = options or VllmOptions()
        self._folder = folder
        self._config, source = open_checkpoint(folder)
        self._shapes = {
            name: tuple(entry.shape)
            for name, entry in source.entries.items()
            if not (name == "lm_head.weight" and self._config.tie_word_embeddings)
        }
        self._reference = reference or self._own_reference
        self._vocabulary = vocabulary
        self._contexts = TokenContexts(
            "vllm",
            self._config.vocab_size,
            self.options.max_context,
            self.options.max_contexts,
            vocabulary is not None,
        )
        self._version, self._checksum = 0, ""
        self._weights: WeightSet | None = None
        self._engine: Any = None
        self._poison = ""
        self._closed = False
        self._thread = LoopThread("vllm-runtime")
        self._thread.run_blocking(self._start())

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
        items: Any = self.stream_step(request)
        async with aclosing(items):
            async for item in items:
                if isinstance(item, StepResult):
                    return item
        raise AssertionError("a stream ends with its result or an error")

    async def stream_step(self, request: StepRequest) -> AsyncIterator[StepDelta | StepResult]:
        self._check_sampling(request)
        begun = time.monotonic()
        context = self._contexts.begin_step(request)
        try:
            items: Any = self._thread.iterate(lambda: self._step(context, request, begun))
            async with aclosing(items):
                async for item in items:
                    yield item
        finally:
            context.busy = ""

    async def cancel(self, ctx: ContextId) -> None:
        context = self._contexts.get(ctx)
        if context is not None:
            context.cancelled = True
            running: str | None = context.cache
            if context.busy and running is not None:
                await self._thread.run(self._engine.abort(running))

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        raise NotSupportedError(
            "get_kv_summary: vLLM keeps no account of one context's KV; see info().capabilities"
        )

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        raise NotSupportedError(
            "evict_kv: vLLM evicts blocks of its prefix cache by itself, not those of one context"
        )

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        """The child's prompt is a hit of the prefix cache, block by block."""
        with self._contexts.lock:
            parent = self._contexts.idle(ctx, "fork")
            child = TokenContext(
                new_id(), policy or parent.policy, list(parent.tokens), list(parent.sampled)
            )
        return self._contexts.add(child)

    async def release(self, ctx: ContextId) -> None:
        context = self._contexts.close(ctx)
        if context is not None and context.busy and context.cache is not None:
            await self._thread.run(self._engine.abort(context.cache))

    async def load_weights(self, weights: WeightSet) -> int:
        await asyncio.to_thread(self._check_weights, weights)
        return await self._thread.run(self._swap(weights))

    async def info(self) -> EngineInfo:
        has_text = {"stop_texts"} if self._vocabulary is not None else set()
        return EngineInfo(
            engine="vllm",
            mri_version=MRI_VERSION,
            weight_version=self._version,
            weight_checksum=self._checksum,
            max_context=self.options.max_context,
            vocab_size=self._config.vocab_size,
            capabilities=_CAPABILITIES | has_text,
            num_contexts=len(self._contexts),
            # blocks of finished requests are free, though their content may still be hit
            kv_bytes_used=0,
            kv_bytes_total=self.options.kv_space_gib * 1024**3,
        )

    def close(self) -> None:
        """Ends vLLM's processes. Idempotent."""
        if not self._closed:
            self._closed = True
            self._thread.run_blocking(self._stop())
            self._thread.close()

    # -- one step, on the loop thread -----------------------------------------------------------

    async def _step(
        self, context: TokenContext, request: StepRequest, begun: float
    ) -> AsyncIterator[StepDelta | StepResult]:
        await self._enter()
        start, said, made = len(context.tokens), len(context.sampled), Made()
        weight_version = self._version
        try:
            due = None if request.deadline_s is None else begun + request.deadline_s
            if due is not None and time.monotonic() >= due:
                made.finish = "deadline"
            outputs: Any = self._outputs(context, request, due)
            async with aclosing(outputs):
                while not made.finish:
                    before = len(made.ids)
                    output = await anext(outputs, None)
                    self._take(context, request, made, output, due)
                    if len(made.ids) > before:
                        yield made.delta(before)
        except BaseException as error:
            if isinstance(error, Exception):
                # a step that raises adds no tokens; one that its caller left keeps them
                del context.tokens[start:], context.sampled[said:]
            raise
        finally:
            self._leave()
        whole = made.delta(0)
        yield StepResult(
            whole.token_ids,
            whole.logprobs,
            made.finish,
            weight_version,
            start,
            top_ids=whole.top_ids,
            top_logprobs=whole.top_logprobs,
            stop_text=made.stop_text,
        )

    async def _outputs(
        self, context: TokenContext, request: StepRequest, due: float | None
    ) -> AsyncIterator[Any]:
        """What vLLM says, ended early by a cancel, the deadline, or the one who reads."""
        context.cache = request_id = uuid.uuid4().hex
        prompt = {"prompt_token_ids": list(context.tokens)}
        outputs = self._engine.generate(prompt, self._params(context, request), request_id)
        timer = None
        if due is not None:
            abort = lambda: asyncio.ensure_future(self._engine.abort(request_id))  # noqa: E731
            timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), abort)
        try:
            async for output in outputs:
                yield output.outputs[0]
        except Exception as error:
            raise EngineError(f"vLLM failed: {type(error).__name__}: {_line(error)}") from error
        finally:
            context.cache = None
            if timer is not None:
                timer.cancel()
            await self._engine.abort(request_id)

    def _take(
        self,
        context: TokenContext,
        request: StepRequest,
        made: Made,
        output: Any,
        due: float | None,
    ) -> None:
        """The tokens of one output, and whether they end the step."""
        for token, entry in zip(
            output.token_ids if output is not None else (),
            (output.logprobs or ()) if output is not None else (),
            strict=True,
        ):
            context.tokens.append(token)
            context.sampled.append(token)
            made.ids.append(token)
            greedy = request.sampling.temperature == 0
            made.logprobs.append(0.0 if greedy else min(0.0, entry[token].logprob))
            if request.num_logprobs:
                made.tops.append(_alternatives(entry, request.num_logprobs))
            if request.stop_texts and self._vocabulary is not None:
                made.text += self._vocabulary.bytes_of(token)
                found = (t for t in request.stop_texts if t.encode() in made.text)
                made.stop_text = next(found, None)
            if token in request.stop_ids or made.stop_text is not None:
                made.finish = "stop"
                return
        ended = output is None or output.finish_reason is not None
        if due is not None and time.monotonic() >= due:
            full = len(made.ids) >= request.max_new_tokens
            made.finish = "length" if full else "deadline"
        elif context.cancelled or (
            ended and output is not None and output.finish_reason == "abort"
        ):
            made.finish = "cancelled"
        elif ended:
            made.finish = "length"

    def _params(self, context: TokenContext, request: StepRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from engine.adapters.vllm_names import DRAW

        asked = request.sampling
        key = context.policy.draw
        if key is None and asked.seed is not None:
            key = seed_key(asked.seed)
        return SamplingParams(
            max_tokens=min(request.max_new_tokens, self.options.max_context - len(context.tokens)),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            repetition_penalty=asked.repetition_penalty,
            logit_bias=dict(asked.logit_bias) or None,
            stop_token_ids=list(request.stop_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=request.num_logprobs,
            output_kind=RequestOutputKind.DELTA,
            extra_args={DRAW: list(astuple(key))} if key is not None else None,
        )

    def _check_sampling(self, request: StepRequest) -> None:
        asked, context = request.sampling, self._contexts.get(request.ctx)
        counted = asked.presence_penalty or asked.frequency_penalty
        if counted and context is not None and context.sampled:
            raise NotSupportedError(
                "presence and frequency penalties in a context that sampled before: vLLM counts "
                "the tokens of one request only; open a new context"
            )

    # -- weights --------------------------------------------------------------------------------

    def _check_weights(self, weights: WeightSet) -> None:
        """All that can be known before vLLM is touched: a bad name there would kill it (trap D)."""
        check_shapes(weights, self._shapes)
        mine = self._config.model_dump(mode="json")
        for name, value in weights.manifest.model_config.items():
            if name not in mine or mine[name] != value:
                raise WeightsError(
                    f"weight set {weights.manifest.version} was made with model.{name}={value}, "
                    f"this engine has {mine.get(name)}; start both with the same model section"
                )

    async def _swap(self, weights: WeightSet) -> int:
        async with self._swapping:
            # running steps end under the old weights; new ones wait at the gate
            self._gate.clear()
            await self._quiet.wait()
            try:
                await self._update(weights)
            except Exception as error:
                reason = self._poison = _line(error) or type(error).__name__
                log.error("vllm_poisoned", version=weights.manifest.version, error=reason)
                await self._restart()
                raise WeightsError(
                    f"weight set {weights.manifest.version} failed in vLLM: {reason}; the "
                    f"engine was started again with version {self._version}"
                ) from error
            finally:
                self._gate.set()
            self._weights = weights
            self._version = weights.manifest.version
            self._checksum = weights.manifest.checksum
            return self._version

    async def _update(self, weights: WeightSet) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine, number = self._engine, str(weights.manifest.version)
        path = await asyncio.to_thread(write_shared, weights)
        try:
            await engine.pause_generation(mode="keep", clear_cache=False)
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest({"path": str(path)}))
            await engine.finish_weight_update(number)
            if self.options.fix_ups:
                await engine.collective_rpc("parl_fix_ups")
            # vLLM leaves it to its user: keys and values of the old weights would be hit
            if not await engine.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("vLLM did not reset its prefix cache")
            await engine.resume_generation()
            await self._probe(weights)
        finally:
            path.unlink(missing_ok=True)

    async def _probe(self, weights: WeightSet) -> None:
        """EngineError when vLLM's logprobs are not those of a reference forward."""
        ids = self._probe_ids()
        found = await self.score(ids)
        expected = await asyncio.to_thread(self._reference, weights, ids)
        error = float(np.abs(found - expected).mean())
        limit = PROBE_LIMIT[self.options.dtype]
        # written so that NaN fails
        if not error <= limit:
            raise EngineError(
                f"the probe's logprobs are off by {error:.2g} on average, at most {limit:g} is "
                "rounding: vLLM computes something else than these weights"
            )

    def _probe_ids(self) -> list[int]:
        return [token % self._config.vocab_size for token in PROBE]

    async def score(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [n - 1]: vLLM's logprob of each token after those before it. On its own loop."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        final = None
        prompt = {"prompt_token_ids": list(ids)}
        async for output in self._engine.generate(prompt, params, uuid.uuid4().hex):
            final = output
        assert final is not None, "vLLM answers every request"
        entries = final.prompt_logprobs[1:]
        return np.array([e[t].logprob for e, t in zip(entries, ids[1:], strict=True)], np.float32)

    def _own_reference(self, weights: WeightSet, ids: Sequence[int]) -> np.ndarray:
        import torch

        from engine.model.dense import forward_dense
        from engine.model.model import PolicyModel

        model = PolicyModel(self._config).eval()
        tokens = torch.tensor([list(ids)])
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(torch.from_numpy(np.array(weights.tensors[name])))
            hidden, _ = forward_dense(model, tokens, torch.ones_like(tokens, dtype=torch.bool))
            logprobs = model.logits(hidden)[0].log_softmax(dim=-1)
        return logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()

    # -- the engine -----------------------------------------------------------------------------

    async def _start(self) -> None:
        self._gate, self._quiet = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._quiet.set()
        self._swapping = asyncio.Lock()
        self._num_running = 0
        await self._launch()

    async def _launch(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._engine = start_vllm(self._folder, self.options, self._config.is_mla)
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest({}))
        # the first step is slow (compiled engines build parts of vLLM there): not a caller's
        await self.score(self._probe_ids())
        self._poison = ""

    async def _restart(self) -> None:
        """After a failed update: a new process, with the last good weights."""
        await self._stop()
        await self._launch()
        if self._weights is not None:
            await self._update(self._weights)

    async def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    async def _enter(self) -> None:
        """Wait at the gate while weights change."""
        while not self._gate.is_set():
            await self._gate.wait()
        if self._engine is None:
            raise ContextLost(f"vLLM has ended ({self._poison or 'closed'}); start a new engine")
        self._num_running += 1
        self._quiet.clear()

    def _leave(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._quiet.set()


def _alternatives(entry: Any, count: int) -> Alternatives:
    """vLLM lists the sampled token too, whatever its rank."""
    best = sorted(entry.items(), key=lambda item: item[1].rank)
    kept = [(token, e.logprob) for token, e in best if np.isfinite(e.logprob)][:count]
    ids, logprobs = np.full(count, -1, np.int32), np.full(count, -np.inf, np.float32)
    for place, (token, logprob) in enumerate(kept):
        ids[place], logprobs[place] = token, logprob
    return Alternatives(ids, logprobs)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
