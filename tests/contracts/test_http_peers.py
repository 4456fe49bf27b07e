"""HTTP beyond the contract: versions, callers that hang up, leases, paths, bad bodies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.adapters.http import HttpRuntime
from engine.adapters.service import MriService
from engine.errors import ContextLost, EngineError, NotSupportedError, WeightsError
from engine.fakes import ScriptedRuntime
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextPolicy, EvictSelector, StepRequest
from parl.weights.store import WeightStore
from tests.contracts.mri_server import ServerProcess, scramble
from tests.engine.tiny import make_weights

POLICY = ContextPolicy()
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def old() -> Iterator[ServerProcess]:
    """A peer of MRI 1.0."""
    server = ServerProcess("scripted", "1.0")
    yield server
    server.close()


def test_a_peer_of_1_0_does_not_confirm(old: ServerProcess):
    """The client finds out by its probe and copes; the rest is as ever."""

    async def check(runtime: HttpRuntime) -> None:
        assert runtime.peer_version == ""
        ctx = await runtime.init_context(PROMPT, POLICY)
        assert runtime.peer_version == "1.0"
        await runtime.forward_step(StepRequest(ctx, 3))
        result = await runtime.evict_kv(ctx, EvictSelector(0, 2))
        assert result.evicted and not result.confirmed
        assert (await runtime.info()).mri_version == "1.0"

    serve(check, old.url)


def test_headers_and_refusals(old: ServerProcess):
    """Every answer names the version; what is no request of MRI is a 4xx with one line."""
    with httpx2.Client(base_url=f"{old.url}/mri", trust_env=False) as client:
        assert client.get("/info").headers["X-MRI-Version"] == "1.0"
        cases: list[tuple[int, dict[str, Any]]] = [
            (400, {"content": b"{"}),
            (400, {"content": b"[]"}),
            (400, {"json": {}, "headers": {"X-MRI-Version": "2.0"}}),
            (422, {"json": {}}),
            (422, {"json": {"token_ids": [1], "colour": 1}}),
            (422, {"json": {"token_ids": ["x"]}}),
            (501, {"json": {"token_ids": [1], "media": [1]}}),
            (409, {"json": {"token_ids": [999]}}),
        ]
        for status, options in cases:
            response = client.post("/init_context", **options)
            assert response.status_code == status, response.text
            message = response.json()["error"]["message"]
            assert message and "\n" not in message
        lost = client.post("/fork", json={"ctx": "nobody"})
        assert (lost.status_code, lost.json()["error"]["type"]) == (404, "ContextLost")


def test_a_caller_that_leaves_ends_its_step(old: ServerProcess):
    """The connection closes, the engine stops; the context can be used again."""

    async def check(runtime: HttpRuntime) -> None:
        ctx = await runtime.init_context(PROMPT, POLICY)
        step = asyncio.ensure_future(runtime.forward_step(StepRequest(ctx, 1_000_000)))
        await asyncio.sleep(0.005)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        for _ in range(100):
            try:
                await runtime.fork(ctx)
                return
            except EngineError:
                await asyncio.sleep(0.02)
        raise AssertionError("the step that nobody waits for still runs")

    serve(check, old.url)


def test_a_cancel_that_overtakes_its_step():
    """It still ends the step, which says so."""

    async def check() -> None:
        service = MriService(ScriptedRuntime(scramble, vocab_size=64, max_context=96))
        ctx = (await service.call("init_context", {"token_ids": PROMPT}))["ctx"]
        await service.call("cancel", {"ctx": ctx, "step_id": "early"})
        request = {"ctx": ctx, "max_new_tokens": 1000}
        step = await service.call("forward_step", {"request": request, "step_id": "early"})
        assert step["finish"] == "cancelled"
        # a late one, of a step that has ended, hits no later step
        await service.call("cancel", {"ctx": ctx, "step_id": "early"})
        step = await service.call("forward_step", {"request": request, "step_id": "next"})
        assert step["finish"] == "length"

    asyncio.run(check())


def test_contexts_are_a_lease():
    """Nobody used it for so long: it is released when the next one is opened."""

    async def check() -> None:
        runtime = ScriptedRuntime(scramble, vocab_size=64)
        service = MriService(runtime, lease_s=0.05)
        first = (await service.call("init_context", {"token_ids": PROMPT}))["ctx"]
        await asyncio.sleep(0.1)
        await service.call("init_context", {"token_ids": PROMPT})
        assert (await runtime.info()).num_contexts == 1
        with pytest.raises(ContextLost):
            await service.call("fork", {"ctx": first})

    asyncio.run(check())


def test_weights_by_path(tmp_path: Path):
    """A version folder below the server's own, nothing outside it."""
    WeightStore(tmp_path / "store").publish(make_weights(4))
    server = ServerProcess("scripted", weights=tmp_path / "store")

    async def check(runtime: HttpRuntime) -> None:
        assert await runtime.load_weights_from("v00004") == 4
        with pytest.raises(WeightsError, match="outside"):
            await runtime.load_weights_from("../../etc")
        with pytest.raises(WeightsError, match="no weight version"):
            await runtime.load_weights_from("v00009")

    try:
        serve(check, server.url)
    finally:
        server.close()


def test_no_path_without_a_folder(old: ServerProcess):
    async def check(runtime: HttpRuntime) -> None:
        with pytest.raises(NotSupportedError, match="no weights folder"):
            await runtime.load_weights_from("v00001")

    serve(check, old.url)


def test_a_server_that_is_not_there():
    """Refused: one line that names it. Gone in the middle: ContextLost."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    async def check(runtime: HttpRuntime) -> None:
        with pytest.raises(EngineError, match="cannot be reached"):
            await runtime.info()

    serve(check, url)


def test_a_server_that_dies_loses_contexts():
    server = ServerProcess("scripted")

    async def check(runtime: HttpRuntime) -> None:
        ctx = await runtime.init_context(PROMPT, POLICY)
        server.process.kill()
        server.process.wait()
        with pytest.raises(EngineError, match=str(runtime._url)):
            await runtime.forward_step(StepRequest(ctx, 1))

    try:
        serve(check, server.url)
    finally:
        server.close()


def serve(check: Any, url: str) -> None:
    async def main() -> None:
        runtime = HttpRuntime(url)
        assert isinstance(runtime, ModelRuntime)
        try:
            await asyncio.wait_for(check(runtime), timeout=60)
        finally:
            await runtime.aclose()

    asyncio.run(main())
