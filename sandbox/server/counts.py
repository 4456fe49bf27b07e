"""What the server counts, in Prometheus' words."""

from __future__ import annotations

from prometheus_client import generate_latest

from infra.metrics.metrics import Metrics
from sandbox.session import Observation, Stop, Verdict


class Counts:
    """One registry a server; names begin with ``parl_sandbox_``."""

    def __init__(self) -> None:
        self._metrics = Metrics(prefix="parl_sandbox")
        metrics = self._metrics
        self._live = metrics.gauge("sessions", "Sessions open now.")
        self._capacity = metrics.gauge("sessions_capacity", "Sessions at most.")
        self._created = metrics.counter("sessions_created", "Sessions created.")
        self._closed = metrics.counter("sessions_closed", "Sessions closed.", ("because",))
        self._calls = metrics.counter("calls", "Tool calls by error class.", ("error",))
        self._stops = metrics.counter("stops", "Episodes a session ended.", ("stop",))
        self._verdicts = metrics.counter("verdicts", "Verifications.", ("result",))
        self._refused = metrics.counter("refused", "Requests refused.", ("door", "code"))
        self._infra = metrics.counter(
            "infra_errors", "Answers that are nobody's reward.", ("code",)
        )
        self._call_s = metrics.histogram("call_seconds", "Time of a tool call.")
        self._create_s = metrics.histogram("create_seconds", "Time to create a session.")
        self._pools = metrics.gauge("boxes", "Boxes since the start.", ("bundle", "what"))

    def created(self, elapsed_s: float) -> None:
        self._created.inc()
        self._create_s.observe(elapsed_s)

    def closed(self, because: str) -> None:
        self._closed.labels(because).inc()

    def called(self, seen: Observation, elapsed_s: float) -> None:
        self._calls.labels(seen.error or "none").inc()
        self._call_s.observe(elapsed_s)
        if seen.stop is not None:
            self.stopped(seen.stop)

    def stopped(self, stop: Stop) -> None:
        self._stops.labels(stop.value).inc()

    def verified(self, verdict: Verdict) -> None:
        if verdict.correctness is None:
            self._verdicts.labels("no_verdict").inc()
        else:
            self._verdicts.labels("passed" if verdict.passed else "failed").inc()

    def refused(self, door: str, code: str, infra: bool) -> None:
        self._refused.labels(door, code).inc()
        if infra:
            self._infra.labels(code).inc()

    def text(self, live: int, capacity: int, pools: list[dict[str, object]]) -> bytes:
        """The exposition, with the gauges as they are now."""
        self._live.set(live)
        self._capacity.set(capacity)
        for pool in pools:
            for what in ("in_use", "opened", "lent", "dirty", "lost"):
                self._pools.labels(pool["bundle"], what).set(float(str(pool[what])))
        return generate_latest(self._metrics.registry)
