"""Watchers of an experiment that write no lines: several at once, and the metrics file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from infra.metrics import Metrics
from parl.rollout.failures import Failure
from parl.rounds.reports import EvalReport, Progress, RoundReport, RunSummary


class Several:
    """Tells every watcher, in order."""

    def __init__(self, watchers: Sequence[Progress]) -> None:
        self._watchers = tuple(watchers)

    def phase_started(self, name: str) -> None:
        for watcher in self._watchers:
            watcher.phase_started(name)

    def warm_step(self, done: int, total: int, loss: float) -> None:
        for watcher in self._watchers:
            watcher.warm_step(done, total, loss)

    def round_done(self, report: RoundReport) -> None:
        for watcher in self._watchers:
            watcher.round_done(report)

    def eval_done(self, report: EvalReport) -> None:
        for watcher in self._watchers:
            watcher.eval_done(report)

    def finished(self, summary: RunSummary) -> None:
        for watcher in self._watchers:
            watcher.finished(summary)


class MetricsWatcher:
    """Every number of a round or evaluation into metrics.jsonl and the Prometheus gauges.

    "infra/engine", "infra/sandbox"... (phase "run") count the run's episodes without a reward so
    far, by what failed them; ``failures`` is asked for them after each part and by ``ended``.
    """

    def __init__(
        self, metrics: Metrics, failures: Callable[[], Mapping[str, int]] | None = None
    ) -> None:
        self._metrics = metrics
        self._failures = failures
        self._step = 0

    def phase_started(self, name: str) -> None: ...

    def warm_step(self, done: int, total: int, loss: float) -> None:
        self._metrics.record(done, {"loss": loss}, phase="warm_start")

    def round_done(self, report: RoundReport) -> None:
        self._metrics.record(report.index, round_values(report), phase=report.phase)
        self._step = report.index
        self.ended()

    def eval_done(self, report: EvalReport) -> None:
        self._metrics.record(0, eval_values(report), phase=f"eval:{report.name}")
        self.ended()

    def ended(self) -> None:
        """Count what failed until now; call it also when the run ends with an error."""
        if self._failures is not None:
            found = self._failures()
            values = {f"infra/{kind}": float(found.get(kind, 0)) for kind in Failure}
            self._metrics.record(self._step, values, phase="run")

    def finished(self, summary: RunSummary) -> None: ...


def round_values(report: RoundReport) -> dict[str, float]:
    """ "success/add", "tokens/add", "gate/add", "outcome/loop", "seconds/collect", "loss"..."""
    values = {"reward": report.reward_mean, "stage": float(report.stage), **report.metrics}
    for task_type, rate in report.success.items():
        values[f"success/{task_type}"] = rate
    for task_type, tokens in report.mean_tokens.items():
        values[f"tokens/{task_type}"] = tokens
    for task_type, tokens in report.tokens_per_solved.items():
        if tokens is not None:
            values[f"tokens_per_solved/{task_type}"] = tokens
    for task_type, is_open in report.gate_open.items():
        values[f"gate/{task_type}"] = float(is_open)
    values |= {f"outcome/{name}": float(count) for name, count in report.outcomes.items()}
    values |= {f"seconds/{name}": seconds for name, seconds in report.seconds.items()}
    return values


def eval_values(report: EvalReport) -> dict[str, float]:
    """ "success", "tokens", "success/add"..."""
    values = {"success": report.success, "tokens": report.mean_tokens}
    values |= {f"success/{name}": rate for name, rate in report.success_by_type.items()}
    values |= {f"tokens/{name}": count for name, count in report.mean_tokens_by_type.items()}
    if report.tokens_per_solved is not None:
        values["tokens_per_solved"] = report.tokens_per_solved
    return values
