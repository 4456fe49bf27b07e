"""A bank statement: its content from draws, and the PDF file of it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandbox.catalog.draws import Draws
from sandbox.catalog.pdf_report.words import WORDS, Words

if TYPE_CHECKING:
    from reportlab.pdfgen.canvas import Canvas

MIN_MONTHS, MAX_MONTHS = 3, 7
MIN_ROWS, MAX_ROWS = 7, 13
FONTS = {"en": ("Helvetica", "Helvetica-Bold"), "zh": ("STSong-Light", "STSong-Light")}
_COLUMNS = (56, 128, 440, 540)
"""x in points: date, text, money in and out (right-aligned)."""


@dataclass(frozen=True, slots=True)
class Row:
    """``cents`` > 0 comes in, < 0 goes out."""

    day: int
    party: str
    reference: str
    cents: int


@dataclass(frozen=True, slots=True)
class Month:
    year: int
    month: int
    opening_cents: int
    rows: tuple[Row, ...]

    @property
    def closing_cents(self) -> int:
        return self.opening_cents + sum(row.cents for row in self.rows)


@dataclass(frozen=True, slots=True)
class Statement:
    """One page a month behind a cover page."""

    language: str
    holder: str
    account: str
    months: tuple[Month, ...]

    @property
    def num_pages(self) -> int:
        return len(self.months) + 1


def draw_statement(draws: Draws, language: str) -> Statement:
    """Parties come back every month, and two of them have names that are easily mixed up."""
    words = WORDS[language]
    pair = draws.choice(words.twins)
    parties = [*pair, *draws.sample(words.parties, 4)]
    year, first = draws.between(2019, 2025), draws.between(1, 12)
    balance = draws.between(2_000_000, 9_000_000)
    months = []
    for offset in range(draws.between(MIN_MONTHS, MAX_MONTHS)):
        number = first - 1 + offset
        rows = _draw_rows(draws, words, parties)
        months.append(Month(year + number // 12, number % 12 + 1, balance, rows))
        balance = months[-1].closing_cents
    return Statement(
        language=language,
        holder=draws.choice(words.holders),
        account="".join(str(draws.below(10)) for _ in range(10)),
        months=tuple(months),
    )


def _draw_rows(draws: Draws, words: Words, parties: list[str]) -> tuple[Row, ...]:
    days = sorted(draws.between(1, 28) for _ in range(draws.between(MIN_ROWS, MAX_ROWS)))
    rows = []
    for position, day in enumerate(days):
        party = parties[position] if position < 2 else draws.choice(parties)
        cents = draws.between(1_000, 480_000)
        incoming = draws.below(3) == 0
        rows.append(Row(day, party, draws.choice(words.references), cents if incoming else -cents))
    return tuple(rows)


def amount_text(cents: int) -> str:
    """1,234.56, also for negative amounts."""
    sign, cents = ("-", -cents) if cents < 0 else ("", cents)
    return f"{sign}{cents // 100:,}.{cents % 100:02d}"


def render_pdf(statement: Statement) -> bytes:
    """The same bytes on every machine: no date, no compression (zlib builds differ)."""
    from reportlab.lib.pagesizes import A4
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.cidfonts import UnicodeCIDFont
    from reportlab.pdfgen.canvas import Canvas

    regular, bold = FONTS[statement.language]
    if statement.language == "zh":
        pdfmetrics.registerFont(UnicodeCIDFont(regular))
    words = WORDS[statement.language]
    buffer = io.BytesIO()
    canvas = Canvas(buffer, pagesize=A4, invariant=1, pageCompression=0)
    canvas.setTitle(words.title)
    top = A4[1] - 72
    _lines(canvas, bold, 16, top, [words.title])
    cover = [
        f"{words.holder}: {statement.holder}",
        f"{words.account}: {statement.account}",
        f"{words.period}: {_month_text(statement.months[0])} - {_month_text(statement.months[-1])}",
        f"{words.pages}: {statement.num_pages}",
        words.currency,
    ]
    _lines(canvas, regular, 11, top - 40, cover)
    canvas.showPage()
    for page, month in enumerate(statement.months, 2):
        _lines(canvas, bold, 13, top, [f"{words.statement} {_month_text(month)}"])
        opening = f"{words.opening}: {amount_text(month.opening_cents)}"
        _lines(canvas, regular, 10, top - 26, [opening])
        y = _table(canvas, (regular, bold), words, month, top - 52)
        closing = f"{words.closing}: {amount_text(month.closing_cents)}"
        _lines(canvas, bold, 10, y - 12, [closing])
        canvas.setFont(regular, 8)
        canvas.drawString(56, 40, f"{words.page} {page} / {statement.num_pages}")
        canvas.showPage()
    canvas.save()
    return buffer.getvalue()


def _table(canvas: Canvas, fonts: tuple[str, str], words: Words, month: Month, y: float) -> float:
    """Header and rows from ``y`` downwards; the y below them."""
    cells = [(words.date, words.text, words.incoming, words.outgoing)]
    for row in month.rows:
        amount = amount_text(abs(row.cents))
        in_out = (amount, "-") if row.cents > 0 else ("-", amount)
        date = f"{month.year}-{month.month:02d}-{row.day:02d}"
        cells.append((date, f"{row.party}, {row.reference}", in_out[0], in_out[1]))
    for index, line in enumerate(cells):
        canvas.setFont(fonts[1] if index == 0 else fonts[0], 10)
        for column, (x, text) in enumerate(zip(_COLUMNS, line, strict=True)):
            (canvas.drawRightString if column > 1 else canvas.drawString)(x, y, text)
        y -= 18
    return y


def _lines(canvas: Canvas, font: str, size: int, y: float, lines: list[str]) -> None:
    canvas.setFont(font, size)
    for line in lines:
        canvas.drawString(56, y, line)
        y -= size + 6


def _month_text(month: Month) -> str:
    return f"{month.year}-{month.month:02d}"
