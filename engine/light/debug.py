"""attention_debug: where the time of a request's batches went, part by part (seed 4.4).

A batch serves many requests at once, so times are of the batches that computed rows of the
request; ``rows`` of their ``batch_rows`` were its own. Compiled attention is one call, so its parts
are what each adds: sink and window alone are read first, then with the retrieved tokens, then with
summaries. The extra reads are thrown away and their time is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Part = Literal["local", "sparse", "summary", "kv"]
PARTS: tuple[Part, ...] = ("local", "sparse", "summary", "kv")
LOCAL_LIMIT, SPARSE_LIMIT, KV_LIMIT = 0.6, 0.5, 0.7
"""Shares of the whole time above which there is advice."""


@dataclass(slots=True)
class PartClock:
    """Of one batch; seconds."""

    began: float = field(default_factory=time.perf_counter)
    parts: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    extra: float = 0.0
    """Spent on asking, not on the batch."""
    hits: int = 0
    wanted: int = 0
    """Far tokens that exact scores choose, and how many of them the index found."""

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] += time.perf_counter() - began

    @contextmanager
    def asking(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.extra += time.perf_counter() - began


@dataclass(slots=True)
class DebugTally:
    """Of one step's batches."""

    seconds: float = 0.0
    parts: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    hits: int = 0
    wanted: int = 0
    batches: int = 0
    rows: int = 0
    batch_rows: int = 0

    def add(self, clock: PartClock, seconds: float, rows: int, batch_rows: int) -> None:
        """A batch that took ``seconds``, what was asked beside it included."""
        self.seconds += seconds - clock.extra
        for name in PARTS:
            self.parts[name] += clock.parts[name]
        self.hits, self.wanted = self.hits + clock.hits, self.wanted + clock.wanted
        self.batches, self.rows = self.batches + 1, self.rows + rows
        self.batch_rows += batch_rows

    def report(self) -> dict[str, Any]:
        """In the seed's words, times in ms."""
        # a difference of two times may come out below nothing
        ms = {name: 1e3 * max(0.0, self.parts[name]) for name in PARTS}
        other = max(0.0, 1e3 * self.seconds - sum(ms.values()))
        times = {
            "local_attn_ms": ms["local"],
            "sparse_attn_ms": ms["sparse"],
            "summary_attn_ms": ms["summary"],
            "kv_cache_ms": ms["kv"],
            "other_ms": other,
        }
        hit_rate = self.hits / self.wanted if self.wanted else None
        return {
            **{name: round(value, 4) for name, value in times.items()},
            "sparse_attn_hit_rate": None if hit_rate is None else round(hit_rate, 4),
            "batches": self.batches,
            "rows": self.rows,
            "batch_rows": self.batch_rows,
            "advice": advice(times, hit_rate),
        }


def advice(times: Mapping[str, float], hit_rate: float | None) -> list[str]:
    """The seed's rules, by a part's share of the whole."""
    whole = sum(times.values())
    if not whole:
        return []
    local, sparse = times["local_attn_ms"] / whole, times["sparse_attn_ms"] / whole
    kv = times["kv_cache_ms"] / whole
    found: list[str] = []
    if local > LOCAL_LIMIT:
        found.append(
            f"local attention takes {local:.0%} (> {LOCAL_LIMIT:.0%}): the window does not "
            "fit these texts; raise attention.hybrid.window, or dense_below for short contexts"
        )
    if sparse > SPARSE_LIMIT:
        rate = "not measured" if hit_rate is None else f"{hit_rate:.0%}"
        found.append(
            f"retrieval takes {sparse:.0%} (> {SPARSE_LIMIT:.0%}), hit rate {rate}: topk is too "
            "small or the index misses; look at attention.hybrid.topk, candidates and index, and "
            "at the summaries of cold blocks"
        )
    if kv > KV_LIMIT:
        found.append(
            f"the KV cache takes {kv:.0%} (> {KV_LIMIT:.0%}): the hot zone is too large or "
            "the warm tier does not compress; lower attention.hot, look at "
            "k25_warm_compression_ratio"
        )
    return found
