"""A workbook of quarterly figures: its content from draws, and the .xlsx file of it."""

from __future__ import annotations

import datetime
import io
import zipfile
from dataclasses import dataclass

from sandbox.catalog.draws import Draws

NUM_QUARTERS = 8
_EPOCH = datetime.datetime(2024, 1, 1)
_ZIP_DATE = (2024, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Words:
    """Labels in one language."""

    measures: tuple[str, ...]
    notes: str
    note_lines: tuple[str, ...]
    total: str
    unit: str
    names: tuple[str, ...]
    quarter: str
    item: str


WORDS = {
    "en": Words(
        measures=("Revenue", "Orders", "Costs", "Shipments", "New customers"),
        notes="Notes",
        note_lines=("Figures are preliminary.", "Totals are formulas.", "Source: controlling"),
        total="Total",
        unit="in thousands",
        names=(
            "North", "South", "East", "West", "Alpine", "Coastal", "Nordics", "Iberia", "Benelux",
            "Baltics", "Balkans", "Overseas",
        ),
        quarter="Q{quarter} {year}",
        item="Region",
    ),
    "zh": Words(
        measures=("营业收入", "订单量", "成本", "出货量", "新客户数"),
        notes="说明",
        note_lines=("数据为初步统计。", "合计为公式。", "来源：集团财务部"),
        total="合计",
        unit="单位：千",
        names=(
            "华北", "华东", "华南", "华中", "西南", "西北", "东北", "港澳", "海外", "长三角",
            "珠三角", "京津冀",
        ),
        quarter="{year}年第{quarter}季度",
        item="大区",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sheet:
    """``values[item][quarter]``; ``top`` and ``left`` are where the header row starts (1-based)."""

    title: str
    items: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    top: int
    left: int


@dataclass(frozen=True, slots=True)
class Workbook:
    language: str
    first_year: int
    sheets: tuple[Sheet, ...]

    def quarter_name(self, index: int) -> str:
        """Header of quarter 0 to 7."""
        year, quarter = self.first_year + index // 4, index % 4 + 1
        return WORDS[self.language].quarter.format(year=year, quarter=quarter)


def draw_workbook(draws: Draws, language: str) -> Workbook:
    """Two or three measures over the same regions, in their own order on each sheet."""
    words = WORDS[language]
    items = draws.sample(words.names, draws.between(4, 7))
    sheets = []
    for title in draws.sample(words.measures, draws.between(2, 3)):
        values = []
        for _ in items:
            row = [draws.between(400, 9_000)]
            while len(row) < NUM_QUARTERS:
                row.append(max(50, row[-1] * draws.between(72, 138) // 100 + draws.below(60)))
            values.append(tuple(row))
        order = tuple(draws.shuffled(items))
        sheets.append(Sheet(title, order, tuple(values), draws.between(2, 4), draws.between(1, 3)))
    return Workbook(language, draws.between(2018, 2024), tuple(sheets))


def render_xlsx(workbook: Workbook) -> bytes:
    """The same bytes on every machine: fixed dates, members stored and not deflated."""
    import openpyxl
    from openpyxl.utils import get_column_letter

    words = WORDS[workbook.language]
    book = openpyxl.Workbook()
    book.properties.created = book.properties.modified = _EPOCH
    notes = book.active
    assert notes is not None, "a new workbook has a sheet"
    notes.title = words.notes
    for row, line in enumerate(words.note_lines, 1):
        notes.cell(row, 1, line)
    for sheet in workbook.sheets:
        page = book.create_sheet(sheet.title)
        page.cell(1, sheet.left, f"{sheet.title} ({words.unit})")
        page.cell(sheet.top, sheet.left, words.item)
        for index in range(NUM_QUARTERS):
            column = sheet.left + 1 + index
            page.cell(sheet.top, column, workbook.quarter_name(index))
            letter = get_column_letter(column)
            for offset, values in enumerate(sheet.values, 1):
                page.cell(sheet.top + offset, column, values[index])
            last = sheet.top + len(sheet.items)
            page.cell(last + 1, column, f"=SUM({letter}{sheet.top + 1}:{letter}{last})")
        for offset, item in enumerate((*sheet.items, words.total), 1):
            page.cell(sheet.top + offset, sheet.left, item)
    raw = io.BytesIO()
    book.save(raw)
    return _stored(raw.getvalue())


def _stored(content: bytes) -> bytes:
    """The archive again, without compression and with one date. openpyxl stamps the time of saving
    into the core properties whatever they say, so it is set back here."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(result, "w") as target:
        for name in sorted(source.namelist()):
            data = source.read(name)
            if name == "docProps/core.xml":
                data = _set_modified(data)
            target.writestr(zipfile.ZipInfo(name, _ZIP_DATE), data)
    return result.getvalue()


def _set_modified(xml: bytes) -> bytes:
    head, mark, rest = xml.partition(b"<dcterms:modified")
    if not mark:
        return xml
    opening, _, after = rest.partition(b">")
    _, _, tail = after.partition(b"</")
    return head + mark + opening + b">" + _EPOCH.isoformat().encode() + b"Z</" + tail
