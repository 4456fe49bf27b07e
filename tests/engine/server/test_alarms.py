"""Alarms and attention_debug through a real server, made of a configuration as by `parl serve`."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.service import MriService
from engine.runtime.types import ContextPolicy, StepRequest
from engine.server.config import ServeConfig
from engine.server.keys import Keys
from engine.server.loading import load
from engine.server.service import Service
from tests.engine.server.conftest import LocalServer, wait_for

MONITORING = Path(__file__).parents[3] / "configs" / "monitoring"
SUFFIXES = re.compile(r"_(bucket|count|sum|total)$")


@contextmanager
def loaded_server(**sections: Any) -> Iterator[LocalServer]:
    """With router, alarms and warm-up."""
    base = {
        "model": {"preset": "demo", "tokenizer": "bytes", "name": "tiny"},
        "engine": {"max_context": 256, "num_blocks": 32, "deterministic": False},
        "alarms": {"total_share": 0.5, "hot_share": 1.0},
        "alarm_every_s": 0.05,
    }
    config = ServeConfig.model_validate({**base, **sections})
    loaded = load(config)
    server = LocalServer(Service(config, Keys({})), loaded)
    try:
        wait_for(lambda: server.service.status == "ok")
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def small() -> Iterator[LocalServer]:
    with loaded_server() as server:
        yield server


def test_every_metric_of_the_monitoring_files_is_exported(small: LocalServer) -> None:
    """Rules and dashboard read nothing that is not there."""
    small.complete(max_tokens=2)
    text = "".join(path.read_text() for path in MONITORING.iterdir())
    wanted = set(re.findall(r"\bk25_[a-z0-9_]+", text))
    assert len(wanted) >= 14
    exported = small.client.get("/metrics").text
    names = set(re.findall(r"^(k25_[a-z0-9_]+)[ {]", exported, re.MULTILINE))
    assert wanted <= names, f"not exported: {sorted(wanted - names)}"
    wait_for(lambda: small.metric("k25_kv_limit_bytes") > 0)
    assert small.metric("k25_kv_limit_bytes") < small.metric("k25_kv_hot_limit_bytes")
    assert small.metric("k25_queue_room") > 0 and small.metric("k25_alarm_level") == 0


@pytest.mark.slow
def test_a_full_cache_raises_red_and_requests_get_429_until_it_is_over(
    small: LocalServer,
) -> None:
    """Red above 16 of 32 blocks; three steps that run, beside the router, take up to 24 of them.
    Running steps are left alone, so the alarm lasts; then requests are taken again."""
    stop = threading.Event()
    busy = threading.Thread(target=lambda: asyncio.run(_hold(small, stop)), daemon=True)
    busy.start()
    try:
        wait_for(lambda: small.metric("k25_alarm_level") == 3, 60)
        refused = []

        def is_refused() -> bool:
            answer = small.post("/v1/completions", prompt="hi", max_tokens=2)
            refused.append(answer)
            return answer.status_code == 429

        wait_for(is_refused, 60)
    finally:
        stop.set()
        busy.join(120)
    error = refused[-1].json()["error"]
    assert error["code"] == "overloaded" and "taking no new contexts" in error["message"]
    assert int(refused[-1].headers["Retry-After"]) >= 1
    wait_for(lambda: small.metric("k25_alarm_level") == 0, 60)
    assert small.complete(max_tokens=2)["choices"]


async def _hold(server: LocalServer, stop: threading.Event) -> None:
    """Three contexts of 130 tokens that sample 120 more, again and again."""
    engine = server.runtime._runtime  # type: ignore[attr-defined]

    async def one(number: int) -> None:
        while not stop.is_set():
            ctx = await engine.init_context([number] * 130, ContextPolicy())
            await engine.forward_step(StepRequest(ctx, 120))
            await engine.release(ctx)

    await asyncio.gather(*(one(number) for number in range(3)))


def test_attention_debug_comes_with_each_choice(small: LocalServer) -> None:
    """Whole and streamed; absent where nobody asked."""
    asks: dict[str, Any] = {"attention_debug": True, "ignore_eos": True}
    told = small.complete(max_tokens=4, **asks)["choices"][0]["attention_debug"]
    assert told["local_attn_ms"] > 0 and told["batches"] == 4 and told["advice"] is not None
    assert "attention_debug" not in small.complete(max_tokens=2)["choices"][0]
    chat = small.chat("hi", max_tokens=3, **asks)["choices"][0]
    assert chat["attention_debug"]["batches"] == 3
    chunks = small.stream("/v1/completions", prompt="hi", max_tokens=3, **asks)
    ends = [c for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]
    assert ends[-1]["attention_debug"]["batches"] == 3


def test_attention_debug_through_mri(small: LocalServer) -> None:
    """As plain JSON."""

    async def ask() -> dict[str, Any]:
        service = MriService(small.runtime)
        ctx = (await service.call("init_context", {"token_ids": [1, 2, 3]}))["ctx"]
        request = {"ctx": ctx, "max_new_tokens": 3, "debug": True}
        answer = await service.call("forward_step", {"request": request})
        await service.call("release", {"ctx": ctx})
        return answer

    answer = json.loads(json.dumps(asyncio.run(ask())))
    assert answer["debug"]["batches"] == 3 and answer["debug"]["other_ms"] > 0
