"""Metrics of a run: Prometheus registry, metrics.jsonl, optional HTTP endpoint."""

from infra.metrics.metrics import METRICS_FILE, Metrics

__all__ = ["METRICS_FILE", "Metrics"]
