"""Tools of the families: what they refuse, and what the worlds behind them do."""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from sandbox.fakes import InProcessSession
from sandbox.packages import package_sources
from sandbox.session import Observation, RawCall
from sandbox.task import TaskSpec
from tests.sandbox.catalog.playing import family_of, play

Call = tuple[str, dict[str, Any]]


def ask(spec: TaskSpec, calls: list[Call]) -> list[Observation]:
    """Calls of one episode in this process."""
    family = family_of(spec.family or "")

    async def go() -> list[Observation]:
        session = InProcessSession(spec, family.bundle)
        started = await session.start()
        assert started.error is None, started.text
        seen = [await session.call(RawCall(tool, json.dumps(a))) for tool, a in calls]
        await session.close()
        return seen

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("1234.50+0.5", "1235"),
        ("0.1+0.2", "0.3"),
        ("-3.5*2", "-7"),
        ("1/3", "0.3333333333"),
        ("round(2.675, 2)", "2.68"),
        ("round(-2.675, 2)", "-2.68"),
        ("round((110/100-1)*100, 2)", "10"),
        ("1/0", "tool_error: division by zero"),
        ("1e9", "tool_error: only numbers (1234.5), + - * / round(x, n) and parentheses"),
        ("1,234", "tool_error: only numbers (1234.5), + - * / round(x, n) and parentheses"),
        ("2**9", "tool_error: only numbers (1234.5), + - * / round(x, n) and parentheses"),
        ("round(1, 99)", "tool_error: round to 0 to 10 places"),
        ("9" * 40, "tool_error: a value is larger than 1000000000000000 or too fine"),
        ("(" * 200, "tool_error: not an expression"),
        ("open('x')", "tool_error: only numbers (1234.5), + - * / round(x, n) and parentheses"),
    ],
)
def test_the_calculator_is_exact_and_safe(expression: str, answer: str):
    """Fractions inside, decimals outside."""
    spec = family_of("excel_growth").instance(0, 0, "train", "en")
    assert ask(spec, [("calc", {"expression": expression})])[0].text == answer


def test_pdf_pages_are_read_from_the_file():
    """Rows come as lines, in both scripts; pages that do not exist are named."""
    for task_type, header in (("en", "Date | Text | Money in | Money out"),
                              ("zh", "日期 | 摘要 | 收入 | 支出")):  # fmt: skip
        spec = family_of("pdf_report").instance(0, 0, "train", task_type)
        pages = int(spec.budget_units["pdf_pages"])
        listed, page, beyond, found, empty = ask(spec, [
            ("list_pages", {}), ("read_page", {"page": 2}), ("read_page", {"page": pages + 1}),
            ("search", {"text": "-01"}), ("search", {"text": "xyzzy"}),
        ])  # fmt: skip
        assert listed.text.startswith(f"{pages} pages\n1: ")
        assert page.text.split("\n")[2] == header
        assert beyond.text == (
            f"tool_error: no page {pages + 1}; the statement has pages 1 to {pages}"
        )
        assert found.text.startswith("page ")
        assert empty.text == "no line contains this text"


def test_workbooks_show_formulas_and_name_bad_ranges():
    """Totals are formulas; a wrong sheet or range gets one clear line."""
    spec = family_of("excel_growth").instance(0, 0, "train", "en")
    (sheets,) = ask(spec, [("list_sheets", {})])
    sheet, _, cells = sheets.text.split("\n")[1].partition(": ")
    table, *bad = ask(spec, [
        ("read_range", {"sheet": sheet, "cells": cells}),
        ("read_range", {"sheet": "Nope", "cells": "A1:B2"}),
        ("read_range", {"sheet": sheet, "cells": "A1:"}),
        ("read_range", {"sheet": sheet, "cells": "hello"}),
        ("read_range", {"sheet": sheet, "cells": "A1:ZZ999"}),
        ("read_range", {"sheet": sheet, "cells": "A:C"}),
    ])  # fmt: skip
    assert "=SUM(" in table.text.split("\n")[-1]
    assert all(seen.error == "tool_error" for seen in bad), [seen.text for seen in bad]
    assert "sheets: Notes, " in bad[0].text


def test_contract_search_is_full_text_search():
    """Stems in English; phrases; Chinese words of two and of more characters."""
    spec = family_of("contract_search").instance(0, 0, "train", "en")
    stem, phrase, nothing, number, broken = ask(spec, [
        ("search", {"query": "delivering"}), ("search", {"query": '"written form"'}),
        ("search", {"query": "zzz"}), ("read_clause", {"number": "99.9"}),
        ("search", {"query": '" OR NEAR( *'}),
    ])  # fmt: skip
    assert "[deliver" in stem.text.lower()
    assert "[written form]" in phrase.text
    assert nothing.text == "no clause contains any of these words"
    assert number.error == "tool_error"
    assert broken.error is None
    spec = family_of("contract_search").instance(0, 0, "train", "zh")
    short, long = ask(spec, [("search", {"query": "赔偿"}), ("search", {"query": "书面形式"})])
    assert "[赔偿]" in short.text
    assert "[书面形式]" in long.text


def test_the_weather_service_behaves_like_a_real_one():
    """A refusal lasts until its time is over; errors say why; slow answers come."""
    spec = family_of("weather_api").instance(0, 0, "train", "en")
    data = json.loads(json.dumps(spec.environment.data))
    station = next(iter(data["stations"]))
    path = f"/v2/stations/{station}/readings"
    date = sorted(data["stations"][station]["readings"])[0]
    data["faults"] = {path: ["429", "500", "slow"]}
    world = type(spec.environment)(data=data)
    changed = type(spec)(**{**{f: getattr(spec, f) for f in spec.__dataclass_fields__},
                            "environment": world})  # fmt: skip
    good = ("http_get", {"path": path, "query": {"date": date}})
    seen = ask(changed, [
        good, good, ("wait", {"seconds": 1}), good, good,
        ("http_get", {"path": "/v1/stations"}), ("http_get", {"path": "/v2/nothing"}),
        ("http_get", {"path": path, "query": {"date": "yesterday"}}),
        ("http_get", {"path": "/v2/stations", "query": {"region": "moon"}}),
        ("http_get", {"path": "/v2/stations", "query": {"region": "coast", "page": "9"}}),
        ("http_get", {"path": "no slash"}), ("wait", {"seconds": 60}),
    ])  # fmt: skip
    status = [" ".join(item.text.split()[:2]) for item in seen]
    assert status[:5] == ["HTTP 429", "HTTP 429", "waited 1", "HTTP 500", "HTTP 200"]
    assert "Retry-After: 1" in seen[0].text
    assert seen[4].elapsed_s > 1.4
    assert status[5:10] == ["HTTP 410", "HTTP 404", "HTTP 400", "HTTP 404", "HTTP 400"]
    assert [item.error for item in seen[10:]] == ["tool_error", "tool_error"]


def test_a_weather_service_ends_with_its_world():
    """No process is left when the working directory is gone."""
    spec = family_of("weather_api").instance(3, 0, "train", "en")
    ask(spec, [("http_get", {"path": "/v2/docs"})])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        left = [line for line in listing.stdout.splitlines() if "parl-inprocess" in line]
        if not [line for line in left if "api.sock" in line]:
            return
        time.sleep(0.1)
    pytest.fail(f"still running: {left}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_ticket_store_holds_what_it_says():
    """100,000 dialogues; filters narrow; every answer ends with its latency, far below 3 s."""
    for task_type in ("en", "zh"):
        family = family_of("ticket_root_cause")
        spec = family.instance(0, 0, "train", task_type)
        incident = spec.environment.data["incident"]
        narrow = {"product": incident["product"], "since": incident["since"]}
        asked: list[Call] = [
            ("count_by", {"field": "product"}),
            ("count_by", {"field": "version", **narrow}),
            ("search", {"query": incident["component"], **narrow}),
            ("read_ticket", {"ticket_id": 100_000}),
            ("read_ticket", {"ticket_id": 100_001}),
            ("count_by", {"field": "day", "since": "soon"}),
        ]
        calls = tuple((RawCall(tool, json.dumps(a)),) for tool, a in asked)
        (episode,) = play(family, [(spec, calls, "")])
        begin, everything, versions, found, last, none, bad = episode.observations
        assert begin.elapsed_s < 30
        assert everything.text.startswith("100000 dialogues\n")
        assert versions.text.split("\n")[1].startswith(incident["version"])
        assert incident["component"] in found.text
        for seen in (everything, versions, found, last):
            assert seen.text.endswith(" ms]")
            assert seen.elapsed_s < 3
        assert (none.error, bad.error) == ("tool_error", "tool_error")


def test_packages_for_a_box_are_pure_and_not_ours():
    """Compiled code, PARL itself and what is not installed stay out; the rest is text."""
    sources = package_sources(("pypdf",))
    assert sources["pypdf"][0] is True and "PdfReader" in sources["pypdf._reader"][1]
    for name, words in (("numpy", "compiled code"), ("nothing-like-this", "not installed")):
        with pytest.raises(Exception, match=words):
            package_sources((name,))
    with pytest.raises(Exception, match=r"part of PARL|editable|lists no Python"):
        package_sources(("parl-agent",))


def test_reading_libraries_are_not_loaded_by_the_registry():
    """`parl --help` must not pay for a PDF library."""
    code = (
        "import sys; import sandbox.catalog.registry as r; r.list_tasks(); "
        "sys.exit(bool({'reportlab', 'pypdf', 'openpyxl'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
