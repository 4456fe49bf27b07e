"""Metrics: counters, gauges and histograms in a registry of their own, and records in a file.

    metrics = Metrics(run_dir)
    metrics.serve(config.run.metrics_port)
    metrics.record(round_index, {"reward/mean": 0.7}, phase="train")
    metrics.counter("episodes", "Episodes finished.", ("outcome",)).labels("loop").inc()

A record is one object a line, ``{"time": epoch s, "step": n, "phase": ..., "values": {...}}``, and
sets the gauges of its values. A value that is not finite is null in the file (JSON has no NaN) and
NaN in the gauge; nothing is raised, because a NaN loss is what one wants to see there. After a
resume a step may occur twice: the later record counts.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.metrics import MetricWrapperBase

from infra.errors import ConfigError
from infra.jsonl import JsonlFile
from infra.ports import listener_of

METRICS_FILE = "metrics.jsonl"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")

W = TypeVar("W", bound=MetricWrapperBase)


class Metrics:
    """The metrics of one process; only the driver passes ``run_dir`` and serves."""

    def __init__(self, run_dir: Path | None = None, *, prefix: str = "parl") -> None:
        """ConfigError when ``run_dir``/metrics.jsonl cannot be written; None = no file."""
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._metrics: dict[str, tuple[MetricWrapperBase, tuple[str, ...]]] = {}
        self._server: tuple[WSGIServer, Thread] | None = None
        self._file: JsonlFile | None = None
        if run_dir is not None:
            try:
                self._file = JsonlFile(run_dir / METRICS_FILE)
            except OSError as error:
                raise ConfigError(
                    f"{run_dir / METRICS_FILE}: {error.strerror}; expected a run folder we may "
                    "write"
                ) from error

    def counter(self, name: str, doc: str, labels: Sequence[str] = ()) -> Counter:
        """The counter of this name, made on first use; Prometheus adds ``_total``."""
        return self._get(
            Counter, name, labels, lambda full: Counter(full, doc, labels, registry=self.registry)
        )

    def gauge(self, name: str, doc: str, labels: Sequence[str] = ()) -> Gauge:
        """The gauge of this name, made on first use."""
        return self._get(
            Gauge, name, labels, lambda full: Gauge(full, doc, labels, registry=self.registry)
        )

    def histogram(
        self,
        name: str,
        doc: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS,
    ) -> Histogram:
        """The histogram of this name, made on first use; ``buckets`` are upper bounds."""
        return self._get(
            Histogram,
            name,
            labels,
            lambda full: Histogram(full, doc, labels, buckets=buckets, registry=self.registry),
        )

    def record(self, step: int, values: Mapping[str, float], **tags: str) -> None:
        """Append one record and set a gauge a value, labelled with ``tags``."""
        if self._file is not None:
            self._file.append({"time": time.time(), "step": step, **tags, "values": dict(values)})
        names = tuple(sorted(tags))
        for name, value in values.items():
            gauge = self.gauge(name, f"Latest {name}.", names)
            (gauge.labels(**tags) if tags else gauge).set(float(value))

    def serve(self, port: int | None, host: str = "127.0.0.1") -> int | None:
        """Serve the registry at http://host:port/metrics from a thread; returns the port.

        None = off, 0 = any free port. ConfigError when the port cannot be had.
        """
        if port is None:
            return None
        try:
            self._server = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(_port_message(error, port, host)) from error
        return self._server[0].server_port

    def close(self) -> None:
        """Stop serving and close the file."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _get(self, kind: type[W], name: str, labels: Sequence[str], make: Callable[[str], W]) -> W:
        full = f"{self._prefix}_{_NOT_IN_NAMES.sub('_', name)}"
        if full not in self._metrics:
            self._metrics[full] = (make(full), tuple(labels))
        metric, labels_before = self._metrics[full]
        assert isinstance(metric, kind) and labels_before == tuple(labels), (
            f"metric {full} is a {type(metric).__name__} with labels {labels_before}, asked "
            f"for a {kind.__name__} with {tuple(labels)}"
        )
        return metric


def _port_message(error: OSError | OverflowError, port: int, host: str) -> str:
    todo = "set run.metrics_port to another port, or to 0 for any free one"
    if isinstance(error, OverflowError):
        return f"metrics port {port}: expected 0..65535; {todo}"
    if error.errno == errno.EADDRINUSE:
        return f"metrics port {port} on {host} is taken by {listener_of(port)}; {todo}"
    return f"metrics port {port} on {host} cannot be opened: {error.strerror or error}; {todo}"
