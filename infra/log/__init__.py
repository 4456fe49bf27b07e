"""Structured logs: ``configure`` once a process, then ``structlog.get_logger(__name__)`` anywhere.

configure(run_dir, "info")
with bound(run=run_id, round=3):
    log.info("round_finished", reward=0.5)   # JSON in log.jsonl, one short line on stderr
"""

from infra.log.progress import Progress
from infra.log.setup import bind, bound, configure

__all__ = ["Progress", "bind", "bound", "configure"]
