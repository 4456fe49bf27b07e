"""The warm-call bench runs, and a warm call beats a process per call."""

import asyncio

from sandbox.bench.warm_call import measure
from sandbox.config import SandboxConfig
from tests.sandbox.conftest import best_level


def test_a_warm_call_is_much_cheaper_than_a_process():
    """In one run on a loaded machine; the p50 bar of 2 ms is for an idle one."""
    config = SandboxConfig(level=best_level().value, unsafe_local=True)
    report = asyncio.run(measure(config, num_calls=100, num_processes=10))
    assert report.ratio > 5
    assert report.call.p50 < 10
