"""MriService: one engine behind plain dictionaries, whatever carries them (HTTP, Triton).

A verb of MRI gets a body of JSON types and gives one back. Contexts are a lease: one that nobody
used for ``lease_s`` is released, so that a client that died costs its memory for so long only.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.adapters.wire import decode, encode, encode_error
from engine.errors import EngineError, NotSupportedError, WeightsError
from engine.runtime.protocol import MRI_VERSION, ModelRuntime, Rewarming, Streaming
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EvictSelector,
    RewarmPolicy,
    StepRequest,
    StepResult,
    WeightManifest,
    WeightSet,
)

log = structlog.get_logger(__name__)
B = TypeVar("B", bound=BaseModel)
LEASE_S = 3600.0
_REMEMBERED = 4096
"""Names of steps kept, so that a cancel that overtook its step still ends it."""


class _Body(BaseModel):
    # a field that this version does not know asks for something it would not do
    model_config = ConfigDict(extra="forbid")


class OpenBody(_Body):
    token_ids: list[int]
    policy: ContextPolicy = Field(default_factory=ContextPolicy)
    media: list[Any] = []


class AppendBody(_Body):
    ctx: str
    token_ids: list[int]
    media: list[Any] = []


class StepBody(_Body):
    request: StepRequest
    step_id: str = ""
    """Named by the client, so that a cancel can reach a step that has not arrived yet."""


class CancelBody(_Body):
    ctx: str
    step_id: str = ""


class ContextBody(_Body):
    ctx: str


class EvictBody(_Body):
    ctx: str
    selector: EvictSelector


class RewarmBody(EvictBody):
    policy: RewarmPolicy = "wait_complete"
    timeout_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)


class ForkBody(_Body):
    ctx: str
    policy: ContextPolicy | None = None


BODIES: dict[str, type[_Body]] = {
    "init_context": OpenBody,
    "append": AppendBody,
    "forward_step": StepBody,
    "stream_step": StepBody,
    "cancel": CancelBody,
    "get_kv_summary": ContextBody,
    "evict_kv": EvictBody,
    "rewarm_kv": RewarmBody,
    "fork": ForkBody,
    "release": ContextBody,
}


class MriService:
    """Belongs to one event loop. Errors: engine.errors, ValueError for a bad body."""

    def __init__(
        self,
        runtime: ModelRuntime,
        *,
        lease_s: float = LEASE_S,
        weights_root: Path | None = None,
    ) -> None:
        """``weights_root``: the folder under which ``load_weights`` may be told a path; None = no
        path is read, sets arrive whole."""
        self._runtime = runtime
        self._lease_s = lease_s
        self._weights_root = weights_root
        self._used: dict[ContextId, float] = {}
        self._running: dict[str, ContextId] = {}
        self._seen: OrderedDict[str, bool] = OrderedDict()
        """Names of steps that arrived (False), or whose cancel came first (True)."""

    async def call(
        self, verb: str, body: Mapping[str, Any], version: str = MRI_VERSION
    ) -> dict[str, Any]:
        """Run ``verb``; the answer is a JSON object, of the fields that ``version`` has."""
        match verb:
            case "info":
                return {**encode(await self._runtime.info()), "mri_version": version}
            case "init_context":
                opened = self._read(OpenBody, verb, body)
                await self._sweep()
                return self._lent(
                    await self._runtime.init_context(opened.token_ids, opened.policy, opened.media)
                )
            case "append":
                given = self._read(AppendBody, verb, body)
                ctx = self._touch(given.ctx)
                await self._runtime.append(ctx, given.token_ids, given.media)
                return {}
            case "forward_step":
                return encode(await self._step(self._read(StepBody, verb, body)))
            case "cancel":
                return await self._cancel(self._read(CancelBody, verb, body))
            case "fork":
                fork = self._read(ForkBody, verb, body)
                return self._lent(await self._runtime.fork(self._touch(fork.ctx), fork.policy))
            case "release":
                ctx = ContextId(self._read(ContextBody, verb, body).ctx)
                self._used.pop(ctx, None)
                await self._runtime.release(ctx)
                return {}
        return await self._call_kv(verb, body, version)

    async def _call_kv(self, verb: str, body: Mapping[str, Any], version: str) -> dict[str, Any]:
        match verb:
            case "get_kv_summary":
                ctx = self._touch(self._read(ContextBody, verb, body).ctx)
                return encode(await self._runtime.get_kv_summary(ctx))
            case "evict_kv":
                evict = self._read(EvictBody, verb, body)
                result = await self._runtime.evict_kv(self._touch(evict.ctx), evict.selector)
                answer = encode(result)
                if version == "1.0":
                    del answer["confirmed"]
                return answer
            case "rewarm_kv":
                given = self._read(RewarmBody, verb, body)
                if not isinstance(self._runtime, Rewarming):
                    raise NotSupportedError("rewarm_kv: this engine has no cold KV to bring back")
                return encode(
                    await self._runtime.rewarm_kv(
                        self._touch(given.ctx), given.selector, given.policy, given.timeout_s
                    )
                )
        raise NotSupportedError(f"MRI has no verb {verb!r}; expected {', '.join(BODIES)} or info")

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """``stream_step``: {"delta": ...} objects, then {"result": ...} or {"error": ...}."""
        try:
            step = self._read(StepBody, "stream_step", body)
            if not isinstance(self._runtime, Streaming):
                raise NotSupportedError("stream_step: this engine answers whole steps only")
            ctx = self._touch(step.request.ctx)
            cancelled = self._arrived(step.step_id)
            self._running[step.step_id] = ctx
            iterator: Any = self._runtime.stream_step(step.request)
            async with aclosing(iterator):
                if cancelled:
                    asyncio.get_running_loop().call_soon(self._cancel_soon, ctx)
                async for item in iterator:
                    kind = "result" if isinstance(item, StepResult) else "delta"
                    yield {kind: encode(item)}
        except (EngineError, ValueError) as error:
            yield {"error": encode_error(error)}
        except Exception as error:  # the answer has begun: the caller must hear of a bug in it
            log.exception("mri_stream_failed")
            yield {"error": encode_error(error)}
        finally:
            self._running.pop(str(body.get("step_id", "")), None)

    async def load_weights(self, weights: WeightSet) -> dict[str, Any]:
        return {"weight_version": await self._runtime.load_weights(weights)}

    async def load_weights_from(self, path: str) -> dict[str, Any]:
        """A version folder of a weight store, below ``weights_root``; WeightsError elsewhere."""
        root = self._weights_root
        if root is None:
            raise NotSupportedError(
                f"load_weights from {path!r}: this server was given no weights folder; send the "
                "tensors, or start it with one"
            )
        folder = (root / path).resolve()
        if not folder.is_relative_to(root.resolve()):
            raise WeightsError(f"weights path {path!r} lies outside the server's weights folder")
        return await self.load_weights(await asyncio.to_thread(read_weights, folder))

    # -- steps ----------------------------------------------------------------------------------

    async def _step(self, body: StepBody) -> StepResult:
        ctx = self._touch(body.request.ctx)
        cancelled = self._arrived(body.step_id)
        self._running[body.step_id] = ctx
        running = asyncio.ensure_future(self._runtime.forward_step(body.request))
        try:
            if cancelled:
                await asyncio.sleep(0)
                await self._runtime.cancel(ctx)
            return await running
        finally:
            self._running.pop(body.step_id, None)
            running.cancel()
            self._touch(ctx)

    def _arrived(self, step_id: str) -> bool:
        """True when its cancel came first."""
        if not step_id:
            return False
        cancelled = self._seen.pop(step_id, False)
        self._remember(step_id, False)
        return cancelled

    def _remember(self, step_id: str, cancelled: bool) -> None:
        self._seen[step_id] = cancelled
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    async def _cancel(self, body: CancelBody) -> dict[str, Any]:
        if body.step_id and body.step_id not in self._seen:
            self._remember(body.step_id, True)
        elif not body.step_id or body.step_id in self._running:
            await self._runtime.cancel(ContextId(body.ctx))
        return {}

    def _cancel_soon(self, ctx: ContextId) -> None:
        task = asyncio.ensure_future(self._runtime.cancel(ctx))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    # -- leases ---------------------------------------------------------------------------------

    def _lent(self, ctx: ContextId) -> dict[str, Any]:
        self._touch(ctx, new=True)
        return {"ctx": ctx}

    def _touch(self, ctx: str, new: bool = False) -> ContextId:
        known = ContextId(ctx)
        if new or known in self._used:
            self._used[known] = time.monotonic()
        return known

    async def _sweep(self) -> None:
        """Release what nobody used for so long; a running step counts as use."""
        oldest = time.monotonic() - self._lease_s
        busy = set(self._running.values())
        for ctx in [c for c, used in self._used.items() if used < oldest and c not in busy]:
            log.info("mri_lease_ended", ctx=ctx, lease_s=self._lease_s)
            del self._used[ctx]
            await self._runtime.release(ctx)

    def _read(self, kind: type[B], verb: str, body: Mapping[str, Any]) -> B:
        try:
            return kind.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise ValueError(f"{verb}: {where}: {' '.join(first['msg'].split())}") from error


# -- weights ------------------------------------------------------------------------------------


def pack_weights(weights: WeightSet) -> bytes:
    """A safetensors file; the manifest is in its metadata. bfloat16 has no numpy dtype: fp32."""
    import json

    import numpy as np
    from safetensors.numpy import save

    tensors = {name: np.asarray(t, order="C") for name, t in weights.tensors.items()}
    return save(tensors, {"manifest": json.dumps(encode(weights.manifest))})


def unpack_weights(data: bytes) -> WeightSet:
    """WeightsError for anything but what ``pack_weights`` wrote; digests are the engine's check."""
    import json

    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        manifest = decode(WeightManifest, json.loads(header["__metadata__"]["manifest"]))
        return WeightSet(manifest, load(data))
    except (SafetensorError, EngineError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"the {len(data)} bytes sent are no weight set: {' '.join(str(error).split())}; "
            "expected safetensors with a manifest in its metadata"
        ) from error


def read_weights(folder: Path) -> WeightSet:
    """A version folder of parl.weights: manifest.json beside weights.safetensors."""
    import json

    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        manifest = decode(WeightManifest, json.loads((folder / "manifest.json").read_text()))
        return WeightSet(manifest, load_file(folder / "weights.safetensors"))
    except (OSError, SafetensorError, EngineError, ValueError) as error:
        raise WeightsError(
            f"{folder.name} is no weight version: {' '.join(str(error).split())}; expected "
            "manifest.json beside weights.safetensors"
        ) from error
