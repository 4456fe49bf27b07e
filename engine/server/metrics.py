"""What the server counts, in Prometheus' words; names begin with ``k25_``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from prometheus_client import generate_latest

from engine.runtime.types import EngineInfo
from engine.server.generate import Event, Piece
from engine.server.job import Job
from infra.metrics.metrics import Metrics

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
OUTCOMES = (
    *("ok", "bad_request", "unauthorized", "not_found", "rate_limited"),
    *("client_gone", "unavailable", "error"),
)


def outcome_of(status: int) -> str:
    """What a status says about a request."""
    if status < 400:
        return "ok"
    if status >= 500:
        return "unavailable" if status == 503 else "error"
    return {401: "unauthorized", 404: "not_found", 429: "rate_limited"}.get(status, "bad_request")


class ServerMetrics:
    """One registry a server."""

    def __init__(self) -> None:
        metrics = self._metrics = Metrics(prefix="k25")
        self._requests = metrics.counter("requests", "Requests by outcome.", ("outcome",))
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._first = metrics.histogram(
            "time_to_first_token_seconds", "From the request to its first token.", buckets=_FIRST_S
        )
        self._next = metrics.histogram(
            "inter_token_seconds", "Between two tokens of one answer.", buckets=_NEXT_S
        )
        self._prompt = metrics.counter("prompt_tokens", "Tokens of prompts.")
        self._shared = metrics.counter(
            "prefix_shared_tokens", "Tokens of prompts that a choice took from another's context."
        )
        self._hits = metrics.gauge(
            "prefix_hit_ratio", "Share of the prompts of all choices that was not computed again."
        )
        self._num_prompt = self._num_shared = 0
        self._sampled = metrics.counter("completion_tokens", "Tokens sampled.")
        self._running = metrics.gauge("running", "Requests that run.")
        self._contexts = metrics.gauge("contexts", "Contexts that the engine holds.")
        self._version = metrics.gauge("weight_version", "Weights that are served; -1 = none.")
        self._used = metrics.gauge("kv_bytes_used", "Of the KV cache, all tiers on the device.")
        self._total = metrics.gauge("kv_bytes_total", "Of the KV cache, at most.")
        self._hot = metrics.gauge("kv_hot_bytes", "Keys and values in full precision.")
        self._warm = metrics.gauge("kv_warm_bytes", "Older ones on the device, in codes.")
        self._cold = metrics.gauge("kv_cold_bytes", "The oldest, in host memory or on disk.")
        self._saved = metrics.gauge(
            "warm_compression_ratio", "1 - warm bytes / bytes of the same tokens in bf16."
        )

    def request(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def running(self, change: int) -> None:
        self._running.inc(change)

    async def timed(
        self, events: AsyncIterator[Event], jobs: Sequence[Job], began: float
    ) -> AsyncIterator[Event]:
        """``events`` as they are; ``began`` is time.monotonic() of the request."""
        last: dict[int, float] = {}
        computed = sum(len(job.prompt_ids) for job in jobs)
        shared = sum(len(job.prompt_ids) * (job.choices - 1) for job in jobs)
        self._prompt.inc(computed)
        self._shared.inc(shared)
        self._num_prompt, self._num_shared = self._num_prompt + computed, self._num_shared + shared
        self._hits.set(self._num_shared / (self._num_prompt + self._num_shared))
        closing: Any = events
        async with aclosing(closing):
            async for event in closing:
                if isinstance(event, Piece):
                    now, num = time.monotonic(), len(event.token_ids)
                    self._sampled.inc(num)
                    if not last:
                        self._first.observe(now - began)
                    elif event.choice in last:
                        # a delta may hold several tokens that a busy loop took at once
                        for _ in range(num):
                            self._next.observe((now - last[event.choice]) / num)
                    last[event.choice] = now
                yield event

    def exposition(self, info: EngineInfo | None, stats: Mapping[str, float]) -> bytes:
        """The text a scraper reads; ``stats``: gauges of the engine by name, without ``k25_``."""
        if info is not None:
            self._contexts.set(info.num_contexts)
            self._version.set(info.weight_version)
            self._used.set(info.kv_bytes_used)
            self._total.set(info.kv_bytes_total)
            self._hot.set(info.kv_hot_bytes)
            self._warm.set(info.kv_warm_bytes)
            self._cold.set(info.kv_cold_bytes)
            # while nothing is warm, what its codes will save
            saved = stats.get("warm_compression_expected", 0.0)
            if info.kv_warm_bf16_bytes:
                saved = 1 - info.kv_warm_bytes / info.kv_warm_bf16_bytes
            self._saved.set(saved)
        for name, value in stats.items():
            self._metrics.gauge(name, f"Of the engine: {name.replace('_', ' ')}.").set(value)
        return generate_latest(self._metrics.registry)
