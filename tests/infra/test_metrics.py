"""Metrics: records in a file, gauges in a registry, the endpoint and its port."""

import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.errors import ConfigError
from infra.jsonl import read_jsonl
from infra.metrics import METRICS_FILE, Metrics
from infra.ports import free_port, listener_of


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Metrics]:
    metrics = Metrics(tmp_path)
    yield metrics
    metrics.close()


def test_record_goes_to_file_and_gauges(metrics: Metrics, tmp_path: Path) -> None:
    """One object a record; the gauges show the latest one of each tag."""
    metrics.record(1, {"reward/mean": 0.5}, phase="train")
    metrics.record(2, {"reward/mean": 0.75}, phase="train")
    metrics.record(2, {"reward/mean": 0.1}, phase="eval")
    records = list(read_jsonl(tmp_path / METRICS_FILE))
    assert [(r["step"], r["phase"], r["values"]) for r in records] == [
        (1, "train", {"reward/mean": 0.5}),
        (2, "train", {"reward/mean": 0.75}),
        (2, "eval", {"reward/mean": 0.1}),
    ]
    assert records[0]["time"] <= records[2]["time"]
    sample = metrics.registry.get_sample_value
    assert sample("parl_reward_mean", {"phase": "train"}) == 0.75
    assert sample("parl_reward_mean", {"phase": "eval"}) == 0.1


def test_nan_is_null_and_nothing_stops(metrics: Metrics, tmp_path: Path) -> None:
    """The file stays strict JSON."""
    metrics.record(1, {"loss": float("nan"), "norm": float("inf"), "ok": 1.0})
    line = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(line)["values"] == {"loss": None, "norm": None, "ok": 1.0}
    assert metrics.registry.get_sample_value("parl_norm") == float("inf")


def test_metrics_are_made_once(metrics: Metrics) -> None:
    """Asking again gives the same metric; asking for another kind is our mistake."""
    metrics.counter("episodes", "Episodes.", ("outcome",)).labels("loop").inc()
    metrics.counter("episodes", "Episodes.", ("outcome",)).labels("loop").inc()
    metrics.histogram("wait_s", "Waits.", buckets=(0.1, 1)).observe(0.5)
    sample = metrics.registry.get_sample_value
    assert sample("parl_episodes_total", {"outcome": "loop"}) == 2
    assert sample("parl_wait_s_bucket", {"le": "1.0"}) == 1
    with pytest.raises(AssertionError, match="metric parl_episodes is a Counter"):
        metrics.gauge("episodes", "Episodes.")


def test_runs_do_not_share_metrics(metrics: Metrics) -> None:
    """Two registries in one process do not collide."""
    other = Metrics()
    metrics.record(0, {"a": 1.0})
    other.record(0, {"a": 2.0})
    assert other.registry.get_sample_value("parl_a") == 2.0
    assert metrics.registry.get_sample_value("parl_a") == 1.0


def test_endpoint_serves_the_registry(metrics: Metrics) -> None:
    """Port 0 takes any free port; None is off."""
    assert metrics.serve(None) is None
    metrics.record(0, {"a": 1.0})
    port = metrics.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        assert b"parl_a 1.0" in page.read()


def test_taken_port_names_port_process_and_remedy(metrics: Metrics) -> None:
    """One line: which port, who has it, what to set."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            metrics.serve(port)
    message = str(caught.value)
    assert f"metrics port {port} on 127.0.0.1 is taken by pid {os.getpid()} (" in message
    assert "set run.metrics_port" in message and "\n" not in message


def test_impossible_port_and_folder(metrics: Metrics, tmp_path: Path) -> None:
    """What cannot be a port or a folder is the user's mistake."""
    with pytest.raises(ConfigError, match=r"metrics port 70000: expected 0\.\.65535"):
        metrics.serve(70000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="File exists; expected a run folder"):
        Metrics(tmp_path / "file")


def test_free_port_has_no_listener() -> None:
    """A port nobody has gives the command to look with."""
    port = free_port()
    assert listener_of(port) == f"a process of another user, see `ss -ltnp sport = :{port}`"
