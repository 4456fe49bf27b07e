"""Cassettes: recorded upstream traffic, replayed without any upstream.

A JSONL file, append-only. Two kinds of records:

- ``tools``: the upstream's tools as it listed them, so that replay needs no server;
- ``call``: canonical request, its key, state token, occurrence, reply and latency.

The state token is a fold over the episode's calls that may have changed the world, so a read after
a write has another token than the same read before it. ``occurrence`` counts equal requests in one
state: the n-th poll replays the n-th answer. Where several recordings hold the same (key, state,
occurrence), the last one wins.

strict: exactly this (key, state, occurrence). latest: past the last occurrence the last answer
repeats, and a state that was never recorded falls back to the last answer of that request.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.proxy.appendlog import AppendLog, read_records
from sandbox.proxy.canonical import digest
from sandbox.proxy.config import Match
from sandbox.proxy.errors import CassetteCorrupt, CassetteMiss
from sandbox.proxy.result import Reply
from sandbox.proxy.scrub import Scrubber

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Take:
    """A recorded answer. ``latency_s`` is how long the upstream took."""

    reply: Reply
    latency_s: float


@dataclass(slots=True)
class _Recorded:
    takes: dict[tuple[str, str, int], Take] = field(default_factory=dict)
    last_occurrence: dict[tuple[str, str], int] = field(default_factory=dict)
    last_take: dict[str, Take] = field(default_factory=dict)
    tools: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    num_torn: int = 0


class Cassette:
    """One file; loads at first use and sees what it appends itself. Not thread-safe: one event
    loop. Several processes may append to one file."""

    def __init__(self, path: Path, scrubber: Scrubber) -> None:
        self.path = path
        self._scrubber = scrubber
        self._log = AppendLog(path)
        self._recorded: _Recorded | None = None
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """sha256 (64 hex digits) over the records in order; stored with each rollout."""
        self._load()
        return self._hash.hexdigest()

    def check(self) -> None:
        """Read it all. CassetteCorrupt."""
        self._load()

    @property
    def num_torn(self) -> int:
        """Lines that a crash cut short; they are no records."""
        return self._load().num_torn

    def request_key(self, upstream: str, canonical: Mapping[str, Any]) -> str:
        """Key of a request: equal for equal canonical requests to one upstream."""
        return digest([upstream, self._scrubber.value(canonical)])

    def tools(self, upstream: str) -> list[dict[str, Any]] | None:
        """The last recorded listing; None if there is none."""
        return self._load().tools.get(upstream)

    def record_tools(self, upstream: str, tools: list[dict[str, Any]]) -> None:
        """Append a listing unless it is the last one already. RecordFailed."""
        if self.tools(upstream) != tools:
            self._append({"kind": "tools", "upstream": upstream, "tools": tools})

    def record(
        self,
        *,
        upstream: str,
        canonical: Mapping[str, Any],
        state: str,
        occurrence: int,
        reply: Reply,
        latency_s: float,
    ) -> None:
        """Append one exchange, scrubbed. RecordFailed."""
        body = self._scrubber.data(reply.body)
        try:
            text, encoding = body.decode("utf-8"), "utf-8"
        except UnicodeDecodeError:
            text, encoding = base64.b64encode(body).decode(), "base64"
        self._append(
            {
                "kind": "call",
                "upstream": upstream,
                "key": self.request_key(upstream, canonical),
                "state": state,
                "n": occurrence,
                "request": self._scrubber.value(dict(canonical)),
                "reply": {
                    "status": reply.status,
                    "headers": self._scrubber.value(reply.headers),
                    "media_type": reply.media_type,
                    "failed": reply.failed,
                    "body": text,
                    "encoding": encoding,
                    "sha256": hashlib.sha256(body).hexdigest(),
                },
                "latency_s": round(latency_s, 6),
            }
        )

    def play(self, key: str, state: str, occurrence: int, match: Match, tool: str) -> Take:
        """The recorded answer. CassetteMiss names tool, key and what there is instead."""
        recorded = self._load()
        take = recorded.takes.get((key, state, occurrence))
        if take is None and match == "latest":
            last = recorded.last_occurrence.get((key, state))
            take = (
                recorded.takes[key, state, last]
                if last is not None
                else recorded.last_take.get(key)
            )
        if take is None:
            if key not in recorded.last_take:
                found = "the request was never recorded"
            elif (key, state) not in recorded.last_occurrence:
                found = "it was recorded, but after other writes"
            else:
                found = f"it was recorded {recorded.last_occurrence[key, state] + 1} times here"
            raise CassetteMiss(f"{tool}: no answer on the cassette (request {key[:12]}): {found}")
        return take

    def close(self) -> None:
        self._log.close()

    def _append(self, record: dict[str, Any]) -> None:
        record = {"v": SCHEMA_VERSION, **record}
        self._load()
        self._log.append(record)
        self._add(record)

    def _load(self) -> _Recorded:
        if self._recorded is None:
            self._recorded = _Recorded()
            if self.path.exists():
                for number, record in read_records(self.path):
                    if record is None:
                        self._recorded.num_torn += 1
                        continue
                    if record.get("v") != SCHEMA_VERSION:
                        raise CassetteCorrupt(
                            f"{self.path}:{number}: schema version {record.get('v')!r}; expected "
                            f"{SCHEMA_VERSION}; record the cassette anew"
                        )
                    self._check(record, number)
                    self._add(record)
        return self._recorded

    def _check(self, record: dict[str, Any], number: int) -> None:
        if record.get("kind") == "tools":
            return
        try:
            body = _body_of(record["reply"])
            intact = hashlib.sha256(body).hexdigest() == record["reply"]["sha256"]
        except (KeyError, TypeError, ValueError):
            intact = False
        if not intact:
            raise CassetteCorrupt(
                f"{self.path}:{number}: the record is damaged or was edited by hand (body hash); "
                "record the cassette anew"
            )

    def _add(self, record: dict[str, Any]) -> None:
        assert self._recorded is not None, "loaded before anything is added"
        recorded = self._recorded
        self._hash.update(digest(record).encode())
        if record["kind"] == "tools":
            recorded.tools[record["upstream"]] = record["tools"]
            return
        reply = record["reply"]
        take = Take(
            Reply(
                body=_body_of(reply),
                media_type=reply["media_type"],
                status=reply["status"],
                headers=reply["headers"],
                failed=reply["failed"],
            ),
            record["latency_s"],
        )
        place = (record["key"], record["state"])
        recorded.takes[*place, record["n"]] = take
        recorded.last_occurrence[place] = max(record["n"], recorded.last_occurrence.get(place, 0))
        recorded.last_take[record["key"]] = take


def _body_of(reply: Mapping[str, Any]) -> bytes:
    if reply["encoding"] == "base64":
        return base64.b64decode(reply["body"], validate=True)
    return reply["body"].encode("utf-8")
