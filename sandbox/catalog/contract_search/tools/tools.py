"""Tools of contract_search: full-text search over the clauses of a contract. Run in the box."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from contextlib import closing
from typing import Any

from sandbox.toolkit import ToolError, tool, workdir

FILE = "contract.db"
MAX_HITS = 8
MAX_TERMS = 12
TOKENIZERS = {"en": "porter unicode61", "zh": "trigram"}
"""English words by their stem; Chinese has no spaces, so every three characters are indexed."""


def setup(data: dict[str, Any]) -> None:
    """Index the contract: ``data["clauses"]`` is a list of [number, article title, text]."""
    with closing(sqlite3.connect(workdir() / FILE)) as db, db:
        db.execute("CREATE TABLE meta (language TEXT)")
        db.execute("INSERT INTO meta VALUES (?)", (data["language"],))
        db.execute("CREATE TABLE clause (id INTEGER PRIMARY KEY, number, title, text)")
        db.executemany("INSERT INTO clause (number, title, text) VALUES (?, ?, ?)", data["clauses"])
        tokenizer = TOKENIZERS[data["language"]]
        db.execute(
            "CREATE VIRTUAL TABLE search USING fts5"
            f"(title, text, content='clause', content_rowid='id', tokenize='{tokenizer}')"
        )
        db.execute("INSERT INTO search (search) VALUES ('rebuild')")


@tool(effect="read", idempotent=True)
def list_articles() -> str:
    """Articles of the contract with their titles and the numbers of their clauses."""
    with closing(sqlite3.connect(workdir() / FILE)) as db:
        rows = db.execute("SELECT number, title FROM clause ORDER BY id").fetchall()
    articles: dict[str, list[str]] = {}
    for number, title in rows:
        articles.setdefault(f"{number.split('.')[0]} {title}", []).append(number)
    return "\n".join(f"{name}: {found[0]} to {found[-1]}" for name, found in articles.items())


@tool(effect="read", idempotent=True)
def search(query: str) -> str:
    """Full-text search: clauses that contain at least one of the words, best first, with an
    excerpt. Put a phrase between double quotes."""
    terms = [phrase or word for phrase, word in re.findall(r'"([^"]+)"|([^\s"]+)', query)]
    if not terms or len(terms) > MAX_TERMS:
        raise ToolError(f"search for 1 to {MAX_TERMS} words")
    with closing(sqlite3.connect(workdir() / FILE)) as db:
        trigram = db.execute("SELECT language FROM meta").fetchone()[0] == "zh"
        short = trigram and any(len(term) < 3 for term in terms)
        rows = _scan(db, terms) if short else _match(db, terms)
    lines = [f"{number} ({title}): {excerpt}" for number, title, excerpt in rows[:MAX_HITS]]
    if len(rows) > MAX_HITS:
        lines.append(f"({len(rows) - MAX_HITS} more clauses; search for something narrower)")
    return "\n".join(lines) or "no clause contains any of these words"


def _match(db: sqlite3.Connection, terms: list[str]) -> list[tuple[str, str, str]]:
    """Through the index, ranked by BM25."""
    expression = " OR ".join('"' + term.replace('"', "") + '"' for term in terms)
    return db.execute(
        "SELECT c.number, c.title, snippet(search, 1, '[', ']', '...', 40)"
        " FROM search JOIN clause c ON c.id = search.rowid"
        " WHERE search MATCH ? ORDER BY rank, c.id",
        (expression,),
    ).fetchall()


def _scan(db: sqlite3.Connection, terms: list[str]) -> list[tuple[str, str, str]]:
    """Terms below three characters are in no trigram: every clause is read."""
    rows = db.execute("SELECT number, title, text FROM clause ORDER BY id").fetchall()
    hits = []
    for number, title, text in rows:
        found = [(text.find(term), term) for term in terms if term in text]
        if not found:
            continue
        start, term = min(found)
        excerpt = text[max(0, start - 20) : start] + f"[{term}]" + text[start + len(term) :][:40]
        hits.append((-len(found), (number, title, f"...{excerpt}...")))
    return [hit for _, hit in sorted(hits, key=lambda entry: entry[0])]


@tool(effect="read", idempotent=True)
def read_clause(number: str) -> str:
    """Full text of one clause, for example 7.2."""
    with closing(sqlite3.connect(workdir() / FILE)) as db:
        row = db.execute("SELECT title, text FROM clause WHERE number = ?", (number.strip(),))
        found = row.fetchone()
    if found is None:
        raise ToolError(f"no clause {number}; list_articles shows the numbers")
    return f"{number.strip()} ({found[0]})\n{found[1]}"


def end_state() -> dict[str, Any]:
    """Fingerprint of the contract: it must not change."""
    with closing(sqlite3.connect(workdir() / FILE)) as db:
        rows = db.execute("SELECT number, title, text FROM clause ORDER BY id").fetchall()
    text = json.dumps(rows, ensure_ascii=False)
    return {"contract_sha256": hashlib.sha256(text.encode()).hexdigest()}
