"""HttpRuntime: MRI of an engine behind HTTP (engine.server.mri).

Retried are calls that may be made twice, and any call whose connection was refused: nothing of it
arrived. A broken connection during another one leaves its outcome unknown: ContextLost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from engine.adapters.client import WireRuntime
from engine.adapters.service import pack_weights
from engine.adapters.wire import decode_error
from engine.errors import ContextLost, EngineError
from engine.runtime.protocol import MRI_VERSION
from engine.runtime.types import WeightSet

HEADER = "X-MRI-Version"
_TWICE = {"info", "get_kv_summary", "cancel", "release", "load_weights"}
"""Verbs whose second call changes nothing more."""
_PAUSES_S = (0.1, 0.5)


class HttpRuntime(WireRuntime):
    """ModelRuntime over HTTP. Errors are the engine's own; EngineError when it cannot be reached or
    does not answer within ``timeout_s``."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        timeout_s: float = 900.0,
        connect_timeout_s: float = 5.0,
        mri_version: str = MRI_VERSION,
    ) -> None:
        """``url``: of the server, without /mri. ``timeout_s``: longest silence of one call, as
        long as its longest step. ``mri_version``: the newest that this client wants to speak."""
        import httpx2

        headers = {HEADER: mri_version}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._http = httpx2
        self._client = httpx2.AsyncClient(
            base_url=f"{self._url}/mri",
            headers=headers,
            timeout=httpx2.Timeout(timeout_s, connect=connect_timeout_s),
            # each running step holds a connection
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )
        super().__init__(f"mri-http {self._url}")

    async def load_weights_from(self, path: PurePosixPath | str) -> int:
        """A version folder below the weights folder of the server, which reads it itself."""
        await self._find_version()
        answer = await self._thread.run(
            self._exchange("load_weights", "POST", json={"path": str(path)})
        )
        return int(answer["weight_version"])

    # -- carrier --------------------------------------------------------------------------------

    async def _send(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if verb == "info":
            return await self._exchange(verb, "GET")
        return await self._exchange(verb, "POST", json=body)

    async def _send_weights(self, weights: WeightSet) -> dict[str, Any]:
        data = await asyncio.to_thread(pack_weights, weights)
        kind = {"Content-Type": "application/octet-stream"}
        return await self._exchange("load_weights", "PUT", content=data, headers=kind)

    async def _probe(self) -> str:
        """A server before 1.1 sends no header."""
        response = await self._request("info", "GET")
        self._answer("info", response)
        return response.headers.get(HEADER, "1.0")

    async def _end(self) -> None:
        await self._client.aclose()

    async def _stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._client.stream("POST", "/stream_step", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._answer("stream_step", response)
                async for line in response.aiter_lines():
                    yield json.loads(line)
        except self._http.TransportError as error:
            raise self._broken("stream_step", error) from error

    async def _exchange(self, verb: str, method: str, **options: Any) -> dict[str, Any]:
        return self._answer(verb, await self._request(verb, method, **options))

    async def _request(self, verb: str, method: str, **options: Any) -> Any:
        http = self._http
        for pause_s in (*_PAUSES_S, None):
            try:
                return await self._client.request(method, f"/{verb}", **options)
            except http.TransportError as error:
                # a read that timed out has had its time already
                again = isinstance(error, (http.ConnectError, http.ConnectTimeout)) or (
                    verb in _TWICE and not isinstance(error, http.TimeoutException)
                )
                if pause_s is None or not again:
                    raise self._broken(verb, error) from error
                await asyncio.sleep(pause_s)
        raise AssertionError("the last turn returns or raises")

    def _broken(self, verb: str, error: Exception) -> EngineError:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, self._http.ReadTimeout):
            return EngineError(
                f"{verb}: {self._url} did not answer within {self._timeout_s:g} s; see its log or "
                "raise timeout_s"
            )
        if isinstance(error, (self._http.ConnectError, self._http.ConnectTimeout)):
            return EngineError(f"{verb}: {self._url} cannot be reached: {reason}; is it running?")
        return ContextLost(
            f"{verb}: the connection to {self._url} broke ({reason}), whether it was done is "
            "unknown; rebuild the context"
        )

    def _answer(self, verb: str, response: Any) -> dict[str, Any]:
        try:
            data = response.json()
        except ValueError:
            data = None
        if response.status_code == 200 and isinstance(data, dict):
            return data
        if isinstance(data, dict) and "error" in data:
            raise decode_error(data["error"])
        text = " ".join(response.text.split())[:200]
        raise EngineError(
            f"{verb}: {self._url} answered {response.status_code} {text!r}; does it serve MRI?"
        )
