"""Tools of pdf_report: read a PDF statement page by page. Run in the box."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pypdf

from sandbox.toolkit import ToolError, tool, workdir

FILE = "statement.pdf"
MAX_HITS = 40


def setup(data: dict[str, Any]) -> None:
    """Write the statement: ``data["pdf"]`` is the file in base64."""
    (workdir() / FILE).write_bytes(base64.b64decode(data["pdf"]))


@tool(effect="read", idempotent=True)
def list_pages() -> str:
    """Number of pages of statement.pdf and the first line of each."""
    pages = _pages()
    titles = [f"{number}: {lines[0] if lines else ''}" for number, lines in enumerate(pages, 1)]
    return "\n".join([f"{len(pages)} pages", *titles])


@tool(effect="read", idempotent=True)
def read_page(page: int) -> str:
    """Text of one page of statement.pdf; the first page is 1."""
    pages = _pages()
    if not 1 <= page <= len(pages):
        raise ToolError(f"no page {page}; the statement has pages 1 to {len(pages)}")
    return "\n".join(pages[page - 1])


@tool(effect="read", idempotent=True)
def search(text: str) -> str:
    """Lines of statement.pdf that contain a text, with their page."""
    wanted = text.casefold().strip()
    if not wanted:
        raise ToolError("search for at least one character")
    hits = [
        f"page {number}: {line}"
        for number, lines in enumerate(_pages(), 1)
        for line in lines
        if wanted in line.casefold()
    ]
    more = [f"({len(hits) - MAX_HITS} more)"] if len(hits) > MAX_HITS else []
    return "\n".join(hits[:MAX_HITS] + more) or "no line contains this text"


def _pages() -> list[list[str]]:
    """Lines of every page, read from the file: cells at the same height make one line."""
    return [_lines(page) for page in pypdf.PdfReader(workdir() / FILE).pages]


def _lines(page: pypdf.PageObject) -> list[str]:
    cells: dict[int, list[tuple[float, str]]] = {}

    def take(text: str, _cm: Any, position: list[float], _font: Any, _size: Any) -> None:
        if text.strip():
            cells.setdefault(round(position[5]), []).append((position[4], " ".join(text.split())))

    page.extract_text(visitor_text=take)
    return [" | ".join(text for _, text in sorted(row)) for _, row in sorted(cells.items())[::-1]]


def end_state() -> dict[str, Any]:
    """Fingerprint of the statement: it must not change."""
    path = workdir() / FILE
    content = path.read_bytes() if path.is_file() else b""
    return {"statement_sha256": hashlib.sha256(content).hexdigest()}
