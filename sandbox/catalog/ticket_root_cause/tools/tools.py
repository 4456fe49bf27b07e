"""Tools of ticket_root_cause: full-text search over 100,000 support dialogues. Run in the box.

``setup`` writes the dialogues from the words, the seed and the incident in ``data`` and indexes
them with SQLite FTS5, so that no host file is shared with a box. Every answer ends with its
latency.
"""

from __future__ import annotations

import random
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import date, timedelta
from typing import Any, Literal

from sandbox.toolkit import ToolError, tool, workdir

FILE = "tickets.db"
MAX_HITS = 10
MAX_GROUPS = 15
MAX_TERMS = 8
EXCERPT_CHARS = 160
FINDING_SHARE = 0.02
"""Background dialogues in which support passes a finding on."""
INCIDENT_FINDING_SHARE = 0.12
INCIDENT_RUMOUR_SHARE = 0.12
"""Dialogues of the incident that name the cause, or one that was ruled out."""


def setup(data: dict[str, Any]) -> None:
    """Build the store from ``data``: language, seed, num_tickets, first_day, num_days, words,
    incident."""
    with closing(sqlite3.connect(workdir() / FILE, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")
        db.execute(
            "CREATE TABLE ticket (id INTEGER PRIMARY KEY, day TEXT, product TEXT, version TEXT,"
            " region TEXT, channel TEXT, text TEXT)"
        )
        db.execute("CREATE VIRTUAL TABLE search USING fts5 (text, content='')")
        db.execute("CREATE TABLE meta (cjk INTEGER)")
        cjk = data["language"] == "zh"
        db.execute("INSERT INTO meta VALUES (?)", (int(cjk),))
        db.execute("BEGIN")
        rows = list(_tickets(data))
        db.executemany("INSERT INTO ticket VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        texts = ((row[0], _spaced(row[6]) if cjk else row[6]) for row in rows)
        db.executemany("INSERT INTO search (rowid, text) VALUES (?, ?)", texts)
        db.execute("COMMIT")


def _tickets(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Background and incident in one order of days."""
    rng = random.Random(data["seed"])
    words, incident = data["words"], data["incident"]
    first = date.fromisoformat(data["first_day"])
    days = [(first + timedelta(days=number)).isoformat() for number in range(data["num_days"])]
    late = [day for day in days if day >= incident["since"]]
    kinds = [True] * incident["num_tickets"]
    kinds += [False] * (data["num_tickets"] - len(kinds))
    stamped = sorted((_pick(rng, late if kind else days), kind) for kind in kinds)
    products = list(words["products"])
    for number, (day, hit) in enumerate(stamped, 1):
        product = incident["product"] if hit else _pick(rng, products)
        version = incident["version"] if hit else _pick(rng, words["products"][product])
        topic = incident["topic"] if hit else _pick(rng, words["topic_names"])
        text = _dialogue(rng, words, topic, product, version, incident if hit else None)
        yield (number, day, product, version, _pick(rng, words["regions"]),
               _pick(rng, words["channels"]), text)  # fmt: skip


def _dialogue(
    rng: random.Random,
    words: dict[str, Any],
    topic: str,
    product: str,
    version: str,
    incident: dict[str, Any] | None,
) -> str:
    """What customer and support wrote, a line each."""
    complaint = _pick(rng, words["greetings"]) + _pick(rng, words["topics"][topic])
    lines = [
        f"{words['customer']}: {complaint}",
        f"{words['agent']}: {_pick(rng, words['questions'])}",
        f"{words['customer']}: {_pick(rng, words['details'])}",
    ]
    chance = rng.random()
    if incident is None and chance < FINDING_SHARE:
        lines.append(_finding(words, "findings", _pick(rng, words["components"]), rng))
    elif incident is not None and chance < INCIDENT_FINDING_SHARE:
        lines.append(_finding(words, "findings", incident["component"], rng))
    elif incident is not None and chance < INCIDENT_FINDING_SHARE + INCIDENT_RUMOUR_SHARE:
        lines.append(_finding(words, "rumours", incident["ruled_out"], rng))
    else:
        lines.append(f"{words['agent']}: {_pick(rng, words['replies'])}")
    lines.append(f"{words['customer']}: {_pick(rng, words['closings'])}")
    return "\n".join(lines).replace("{product}", product).replace("{version}", version)


def _finding(words: dict[str, Any], kind: str, component: str, rng: random.Random) -> str:
    return f"{words['agent']}: {_pick(rng, words[kind]).replace('{component}', component)}"


def _pick(rng: random.Random, items: list[Any]) -> Any:
    return items[int(rng.random() * len(items))]


def _spaced(text: str) -> str:
    """A space behind every character: Chinese has none, so each character is a token here and a
    word is a phrase of them. (A regular expression for this costs more than the index itself.)"""
    return " ".join(text)


@tool(effect="read", idempotent=True)
def search(
    query: str, product: str = "", version: str = "", since: str = "", until: str = ""
) -> str:
    """Dialogues that contain every word of the query, best first, ten at most; put a phrase between
    double quotes. The other arguments narrow it down; days are YYYY-MM-DD, both included."""
    begin = time.perf_counter()
    with _open() as db:
        where, values = _where(db, query, product, version, since, until)
        if not query.strip():
            raise ToolError("query is empty; count_by works without one")
        total = db.execute(f"SELECT count(*) {where}", values).fetchone()[0]
        rows = db.execute(
            "SELECT t.id, t.day, t.product, t.version, t.region, t.text"
            f" {where} ORDER BY search.rank, t.id LIMIT {MAX_HITS}",
            values,
        ).fetchall()
    lines = [f"{total} dialogues" + (f", the best {MAX_HITS}:" if total > MAX_HITS else ":")]
    for number, day, name, release, region, text in rows:
        lines.append(f"#{number} {day} {name} {release} {region}: {_excerpt(text, query)}")
    return _timed(lines, begin)


@tool(effect="read", idempotent=True)
def count_by(
    field: Literal["day", "product", "version", "region", "channel"],
    query: str = "",
    product: str = "",
    version: str = "",
    since: str = "",
    until: str = "",
) -> str:
    """Number of dialogues by a field, largest first; the other arguments are those of search, and
    the query may be empty."""
    begin = time.perf_counter()
    with _open() as db:
        where, values = _where(db, query, product, version, since, until)
        rows = db.execute(
            f"SELECT t.{field}, count(*) {where} GROUP BY 1 ORDER BY 2 DESC, 1", values
        ).fetchall()
    lines = [f"{sum(count for _, count in rows)} dialogues"]
    lines += [f"{value}: {count}" for value, count in rows[:MAX_GROUPS]]
    if len(rows) > MAX_GROUPS:
        lines.append(f"({len(rows) - MAX_GROUPS} more values)")
    return _timed(lines, begin)


@tool(effect="read", idempotent=True)
def read_ticket(ticket_id: int) -> str:
    """One dialogue with its day, product, version, region and channel."""
    begin = time.perf_counter()
    with _open() as db:
        row = db.execute("SELECT * FROM ticket WHERE id = ?", (ticket_id,)).fetchone()
    if row is None:
        raise ToolError(f"no ticket {ticket_id}")
    return _timed([f"#{row[0]} " + " ".join(row[1:6]), row[6]], begin)


def _open() -> closing[sqlite3.Connection]:
    """Read-only."""
    uri = f"file:{workdir() / FILE}?mode=ro&immutable=1"
    return closing(sqlite3.connect(uri, uri=True))


def _where(
    db: sqlite3.Connection, query: str, product: str, version: str, since: str, until: str
) -> tuple[str, list[str]]:
    """FROM and WHERE with their values; ToolError for a query or a day that cannot be read."""
    terms = [phrase or word for phrase, word in re.findall(r'"([^"]+)"|([^\s"]+)', query)]
    if len(terms) > MAX_TERMS:
        raise ToolError(f"at most {MAX_TERMS} words")
    conditions, values = [], []
    source = "FROM ticket t"
    if terms:
        cjk = db.execute("SELECT cjk FROM meta").fetchone()[0]
        source += " JOIN search ON search.rowid = t.id"
        conditions.append("search MATCH ?")
        phrases = [(_spaced(term) if cjk else term).replace('"', " ") for term in terms]
        values.append(" ".join(f'"{phrase}"' for phrase in phrases))
    for column, value in (("product", product), ("version", version)):
        if value.strip():
            conditions.append(f"t.{column} = ?")
            values.append(value.strip())
    for sign, value in ((">=", since), ("<=", until)):
        if value.strip():
            if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value.strip()):
                raise ToolError(f"day {value!r}: expected YYYY-MM-DD")
            conditions.append(f"t.day {sign} ?")
            values.append(value.strip())
    return source + (" WHERE " + " AND ".join(conditions) if conditions else ""), values


def _excerpt(text: str, query: str) -> str:
    """Text from the line with the first word of the query on."""
    word = query.replace('"', " ").split()[0].casefold()
    start = text.rfind("\n", 0, max(0, text.casefold().find(word))) + 1
    return " / ".join(text[start : start + EXCERPT_CHARS].splitlines())


def _timed(lines: list[str], begin: float) -> str:
    return "\n".join([*lines, f"[{1000 * (time.perf_counter() - begin):.0f} ms]"])


def end_state() -> dict[str, Any]:
    """Nothing: the store is read-only, the answer counts."""
    return {}
