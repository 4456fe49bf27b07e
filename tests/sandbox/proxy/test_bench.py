"""The proxy bench runs and loses nothing."""

import asyncio

from sandbox.bench.proxy import measure


def test_the_bench_runs() -> None:
    """Small numbers; figures are for a quiet machine."""
    report = asyncio.run(measure(num_calls=5, num_waiting=20))
    assert report.num_lost == 0 and report.waiting_s < 10
    assert len(report.timings) == 5 and all(len(t.samples) == 5 for t in report.timings)
