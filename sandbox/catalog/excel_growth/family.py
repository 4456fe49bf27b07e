"""ExcelGrowth: quarterly growth from a workbook, a real .xlsx of several sheets.

Written with openpyxl on the host, read with openpyxl in the box. Tables start at different cells,
the regions stand in another order on each sheet, and totals are formulas that the agent must add
up itself. Budget unit: the calls of a direct solution.
"""

from __future__ import annotations

import base64
import hashlib
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import ClassVar

from sandbox.catalog.draws import Draws
from sandbox.catalog.excel_growth.workbook import (
    NUM_QUARTERS,
    Sheet,
    draw_workbook,
    render_xlsx,
)
from sandbox.catalog.generated import Accepts, Call, Drawn, GeneratedFamily

KINDS = ("quarter", "year", "total", "best", "worst")
QUESTIONS = {
    "en": {
        "quarter": "By how many percent did {measure} of {name} grow in {now} against the quarter "
        "before?",
        "year": "By how many percent did {measure} of {name} grow in {now} against the same "
        "quarter of the year before?",
        "total": "By how many percent did {measure} of all regions together grow in {now} against "
        "the quarter before?",
        "best": "Which region had the highest growth of {measure} in {now} against the quarter "
        "before, and how many percent was it?",
        "worst": "Which region had the lowest growth of {measure} in {now} against the quarter "
        "before, and how many percent was it?",
        "number": "Reply with the number only, in percent with two decimals, for example 12.34 or "
        "-5.60.",
        "named": "Reply with the region and the number only, in percent with two decimals, for "
        "example: North 12.34",
    },
    "zh": {
        "quarter": "{name}的{measure}在{now}的环比增长率是多少（相对上一季度）？",
        "year": "{name}的{measure}在{now}的同比增长率是多少（相对上一年同一季度）？",
        "total": "所有大区合计的{measure}在{now}的环比增长率是多少（相对上一季度）？",
        "best": "{now}哪个大区的{measure}环比增长率最高（相对上一季度）？增长率是多少？",
        "worst": "{now}哪个大区的{measure}环比增长率最低（相对上一季度）？增长率是多少？",
        "number": "只回答数字，单位为百分比，保留两位小数，例如 12.34 或 -5.60。",
        "named": "只回答大区名称和数字，单位为百分比，保留两位小数，例如：华北 12.34",
    },
}
FRAME = {"en": "report.xlsx holds quarterly figures. ", "zh": "report.xlsx 是季度数据表。"}
CLEAR_LEAD = Fraction(1, 10)
"""Percentage points between the best region and the next."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ExcelGrowth(GeneratedFamily):
    """The family; task types are the language of workbook and question."""

    name = "excel_growth"
    packages: ClassVar[tuple[str, ...]] = ("openpyxl", "et_xmlfile")
    parts: ClassVar[tuple[str, ...]] = ("calculator",)
    verify_parts: ClassVar[tuple[str, ...]] = ("named_number",)

    def draw(self, draws: Draws, task_type: str, accepts: Accepts) -> Drawn | None:
        """See ``GeneratedFamily``."""
        workbook = draw_workbook(draws, task_type)
        sheet = draws.choice(workbook.sheets)
        kind = draws.choice(KINDS)
        now = draws.between(4 if kind == "year" else 1, NUM_QUARTERS - 1)
        before = now - 4 if kind == "year" else now - 1
        item = draws.below(len(sheet.items))
        growths = [percent(values[now], values[before]) for values in sheet.values]
        if kind in ("best", "worst"):
            extreme = max(growths) if kind == "best" else min(growths)
            item = growths.index(extreme)
            others = growths[:item] + growths[item + 1 :]
            if min(abs(extreme - other) for other in others) < CLEAR_LEAD:
                return None
        if kind == "total":
            expressions = [_total_expression(sheet, now, before)]
            growth = percent(*(sum(v[q] for v in sheet.values) for q in (now, before)))
        else:
            rows = range(len(sheet.items)) if kind in ("best", "worst") else [item]
            expressions = [_expression(sheet.values[row], now, before) for row in rows]
            growth = growths[item]
        if (growth * 100).denominator == 2:
            return None  # half a hundredth: rounding rules differ
        answer = two_decimals(growth)
        name = sheet.items[item] if kind in ("best", "worst") else ""
        words = QUESTIONS[task_type]
        question = words[kind].format(
            measure=sheet.title, name=sheet.items[item], now=workbook.quarter_name(now)
        )
        if not accepts(f"{workbook}|{sheet.title}|{kind}|{now}|{item}"):
            return None
        xlsx = render_xlsx(workbook)
        rounds: list[tuple[Call, ...]] = [
            (("list_sheets", {}),),
            (("read_range", {"sheet": sheet.title, "cells": _cells(sheet)}),),
            # independent sums of one turn
            tuple(("calc", {"expression": expression}) for expression in expressions),
        ]
        joiner = "" if task_type == "zh" else " "
        return Drawn(
            instruction=FRAME[task_type] + question + joiner + words["named" if name else "number"],
            world={"xlsx": base64.b64encode(xlsx).decode()},
            judge={
                "name": name,
                "percent": answer,
                "workbook_sha256": hashlib.sha256(xlsx).hexdigest(),
            },
            units={"calls": float(sum(len(turn) for turn in rounds))},
            rounds=tuple(rounds),
            final_text=f"{name} {answer}".strip(),
        )


def percent(now: int, before: int) -> Fraction:
    """Growth in percent, exact."""
    return Fraction(100 * (now - before), before)


def two_decimals(value: Fraction) -> str:
    """Rounded half away from zero, as a spreadsheet does."""
    scaled = Decimal(value.numerator) / Decimal(value.denominator)
    return f"{scaled.quantize(Decimal('0.01'), ROUND_HALF_UP) + 0:f}"


def _expression(values: tuple[int, ...], now: int, before: int) -> str:
    return f"round(({values[now]}/{values[before]}-1)*100, 2)"


def _total_expression(sheet: Sheet, now: int, before: int) -> str:
    sums = ["(" + "+".join(str(values[q]) for values in sheet.values) + ")" for q in (now, before)]
    return f"round(({sums[0]}/{sums[1]}-1)*100, 2)"


def _cells(sheet: Sheet) -> str:
    """The whole table, header to total."""
    last = LETTERS[sheet.left - 1 + NUM_QUARTERS]
    return f"{LETTERS[sheet.left - 1]}{sheet.top}:{last}{sheet.top + len(sheet.items) + 1}"
