"""The audit log and the journal of calls that may not be sent twice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from sandbox.proxy.appendlog import AppendLog, read_records
from sandbox.proxy.result import Account, ProxyResult
from sandbox.proxy.scrub import Scrubber


class AuditLog:
    """``audit.jsonl``: one line per call, with the fields of facts/sandboxes.md 2, point 9."""

    def __init__(self, path: Path, scrubber: Scrubber) -> None:
        self._log = AppendLog(path)
        self._scrubber = scrubber

    def record(
        self,
        *,
        episode: str,
        policy_version: int | None,
        call_index: int,
        tool: str,
        repairs: Sequence[str],
        account: Account,
        result: ProxyResult,
    ) -> None:
        """Append the line of a finished call. RecordFailed when it cannot be written."""
        self._log.append(
            self._scrubber.value(
                {
                    "at": round(time.time(), 3),
                    "episode": episode,
                    "policy_version": policy_version,
                    "call_index": call_index,
                    "tool": tool,
                    "kind": account.kind,
                    "argument_hash": account.argument_hash,
                    "repairs": list(repairs),
                    "mode": account.mode,
                    "effect": account.effect,
                    "status": result.status,
                    "error": result.error,
                    "outcome": result.outcome,
                    "infra": result.infra,
                    "bytes": result.num_bytes,
                    "ms": round(result.elapsed_ms, 3),
                    "cost": result.cost,
                    "attempts": result.num_attempts,
                    "cassette_hit": result.cassette_hit,
                    "cassette_digest": result.cassette_digest,
                    "idempotency_key": account.idempotency_key,
                    "canary_leak": result.canary_leak,
                }
            )
        )

    def close(self) -> None:
        self._log.close()


class Journal:
    """``journal.jsonl``: keys of calls that must not run twice, on disk before they are sent.

    A proxy that was killed and started again finds them here: the same call, delivered again, has
    the outcome "unknown" and is not sent.
    """

    def __init__(self, path: Path) -> None:
        self._log = AppendLog(path, fsync=True)
        self._sent: set[str] = set()
        if path.exists():
            self._sent = {str(record["key"]) for _, record in read_records(path) if record}

    def was_sent(self, key: str) -> bool:
        return key in self._sent

    def sending(self, key: str, episode: str, tool: str) -> None:
        """Call before the first attempt. RecordFailed: then it must not be sent."""
        self._log.append(
            {"key": key, "episode": episode, "tool": tool, "at": round(time.time(), 3)}
        )
        self._sent.add(key)

    def close(self) -> None:
        self._log.close()
