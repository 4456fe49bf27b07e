"""PdfReport: questions about a bank statement, a real PDF of 4 to 8 pages.

The pages are drawn with reportlab on the host and read with pypdf in the box. A question needs the
figures of several pages and a sum over them; two of the parties have names that are easily mixed
up. Budget unit: pages.
"""

from __future__ import annotations

import base64
import hashlib
from typing import ClassVar

from sandbox.catalog.draws import Draws
from sandbox.catalog.generated import Accepts, Call, Drawn, GeneratedFamily
from sandbox.catalog.pdf_report.statement import (
    Month,
    Statement,
    amount_text,
    draw_statement,
    render_pdf,
)
from sandbox.catalog.pdf_report.words import WORDS

KINDS = ("party_out", "party_in", "party_net", "net_flow", "largest")


class PdfReport(GeneratedFamily):
    """The family; task types are the language of statement and question."""

    name = "pdf_report"
    packages: ClassVar[tuple[str, ...]] = ("pypdf",)
    parts: ClassVar[tuple[str, ...]] = ("calculator",)

    def draw(self, draws: Draws, task_type: str, accepts: Accepts) -> Drawn | None:
        """See ``GeneratedFamily``."""
        words = WORDS[task_type]
        statement = draw_statement(draws, task_type)
        kind = draws.choice(KINDS)
        count = draws.between(2, len(statement.months))
        start = draws.below(len(statement.months) - count + 1)
        months = statement.months[start : start + count]
        party = draws.choice(sorted({row.party for row in months[0].rows[:2]}))
        if not terms_of(kind, months, party):
            kind = "net_flow"  # nothing to add up would make 0.00 a good guess
        terms = terms_of(kind, months, party)
        question = words.questions[kind].format(
            party=party,
            first=f"{months[0].year}-{months[0].month:02d}",
            last=f"{months[-1].year}-{months[-1].month:02d}",
        )
        if not accepts(_identity(statement, kind, party, start, count)):
            return None
        total = sum(terms)
        pdf = render_pdf(statement)
        answer = amount_text(total).replace(",", "")
        rounds: list[tuple[Call, ...]] = [(("list_pages", {}),)]
        pages = range(start + 2, start + 2 + count)
        rounds += [(("read_page", {"page": page}),) for page in pages]
        # net_flow adds up to 91 numbers and the tool takes 500 characters: in parts
        rounds += [(("calc", {"expression": part}),) for part in _parts(terms)]
        return Drawn(
            instruction=words.frame.format(question=question),
            world={"pdf": base64.b64encode(pdf).decode()},
            judge={"answer": answer, "statement_sha256": hashlib.sha256(pdf).hexdigest()},
            units={"pdf_pages": float(statement.num_pages)},
            rounds=tuple(rounds),
            final_text=answer,
        )


def terms_of(kind: str, months: tuple[Month, ...], party: str) -> list[int]:
    """The cents whose sum is the answer."""
    rows = [row for month in months for row in month.rows]
    match kind:
        case "party_out":
            return [-row.cents for row in rows if row.party == party and row.cents < 0]
        case "party_in":
            return [row.cents for row in rows if row.party == party and row.cents > 0]
        case "party_net":
            return [-row.cents for row in rows if row.party == party]
        case "net_flow":
            return [row.cents for row in rows]
    return [max((-row.cents for row in month.rows if row.cents < 0), default=0) for month in months]


def _parts(terms: list[int]) -> list[str]:
    """The terms as expressions, 30 numbers each."""
    texts = []
    for start in range(0, len(terms), 30):
        text = "+".join(amount_text(cents).replace(",", "") for cents in terms[start : start + 30])
        texts.append(text.replace("+-", "-"))
    return texts


def _identity(statement: Statement, kind: str, party: str, start: int, count: int) -> str:
    return f"{statement}|{kind}|{party}|{start}|{count}"
