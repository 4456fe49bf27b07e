"""Other values of a kind, other answers, conditions on the clock: the pure parts of the check."""

from __future__ import annotations

import ast
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.check.cassettes import check_cassettes
from sandbox.check.clock import SHIFTS
from sandbox.check.findings import Step
from sandbox.check.lint_luck import lint_luck
from sandbox.check.scripts import oracle_of
from sandbox.check.values import argument_sets, other_answer, siblings
from sandbox.task import load_task
from sandbox.templates.new import write_task
from tests.sandbox.check.planting import replay

DATA = {
    "orders": [{"id": "o-1", "cents": 5}, {"id": "o-2", "cents": 7}],
    "items": {"lamp": {"price": 3}, "bolt": {"price": 4}},
    "files": {"x.py": "o-3"},
}


@pytest.mark.parametrize(
    ("value", "others"),
    [("o-1", ["o-2"]), ("lamp", ["bolt"]), (5, [7]), (3, []), ("x.py", []), (True, []),
     ("a\nb", []), ("orders", ["items"])],
)  # fmt: skip
def test_what_stands_at_the_same_place_is_of_the_same_kind(value: object, others: list):
    """List positions do not count, keys of one object are alike, files are no values."""
    found = siblings(value, DATA)
    assert [other for other in found if other != "files"] == others


def test_a_schema_s_choices_come_first_and_texts_last():
    assert siblings("mon", DATA, (), {"enum": ["mon", "tue"]}) == ["tue"]
    assert siblings("t-17", DATA, ("see t-18, t-19 and u18",)) == ["t-18", "t-19"]


@given(st.text(max_size=30))
def test_another_answer_is_another(answer: str):
    assert other_answer(answer) != answer


def test_argument_sets_begin_with_what_the_solution_passes(tmp_path: Path):
    """Then every item of the world, so that a read which fails for one of them is met."""
    spec = load_task(write_task(tmp_path / "x", "acme/x", "python")).spec
    tool = next(tool for tool in spec.tools if tool.name == "set_price")
    sets = argument_sets(spec, tool, [{"item": "lamp", "price": 2820}], ("lamp: stock 9",))
    assert sets[0] == {"item": "lamp", "price": 2820}
    assert {"bolt M6", "bolt M8", "cable 2 m", "hinge", "switch"} <= {each["item"] for each in sets}
    assert all(set(each) == {"item", "price"} for each in sets)


def found_in(tmp_path: Path, code: str) -> list[str]:
    """Rules for a service of this code."""
    ast.parse(code)
    path = tmp_path / "environment" / "service.py"
    path.parent.mkdir()
    path.write_text(code)
    step = Step("lint")
    lint_luck(tmp_path, step)
    return [finding.rule for finding in step.findings]


@pytest.mark.parametrize(
    "code",
    [
        "import time\nend = time.time() + 8\nwhile time.time() < end:\n    pass\n",
        "import time\nstart = time.monotonic()\nif time.monotonic() - start > 5:\n    pass\n",
        "import time\nstart = time.time()\nif time.time() - start > 5:\n    pass\n",
        "import random\nrng = random.Random(7)\nif rng.random() < 0.1:\n    pass\n",
        "import random\nrandom.seed(7)\nif random.random() < 0.1:\n    pass\n",
        "import datetime\nprint(datetime.datetime.now().isoformat())\n",
        "from datetime import date\nif date(2026, 1, 1).weekday() > 4:\n    pass\n",
    ],
)
def test_deadlines_and_seeded_draws_are_fine(tmp_path: Path, code: str):
    """Waiting, measuring, and drawing from a seed change no answer."""
    assert found_in(tmp_path, code) == []


@pytest.mark.parametrize(
    "code",
    [
        "import time as t\nif t.time() % 60 < 1:\n    pass\n",
        "from time import time\nif time() > 1800000000:\n    pass\n",
        "import datetime as d\nnow = d.datetime.now()\nx = 1 if now.hour > 17 else 2\n",
        "from datetime import date\nif date.today() > date(2027, 6, 30):\n    pass\n",
        "from random import random as luck\nif luck() < 0.01:\n    pass\n",
        "import secrets\ndraw = secrets.randbelow(50)\nif draw == 0:\n    pass\n",
        "import random\nbad = [x for x in range(9) if random.random() < 0.5]\n",
    ],
)
def test_conditions_on_the_clock_or_on_luck_are_found(tmp_path: Path, code: str):
    assert found_in(tmp_path, code) == ["luck-in-world"]


def test_the_other_times_cover_every_day_of_the_week():
    """Whatever the day is on which a task is checked."""
    for start in range(7):
        now = datetime(2026, 11, 2 + start, 12, tzinfo=UTC)
        assert {(now + shift).weekday() for shift in (timedelta(), *SHIFTS)} == set(range(7))


def test_a_record_without_arguments_counts_but_is_told(tmp_path: Path):
    """One whose arguments are not JSON answers nothing."""
    folder = write_task(tmp_path / "x", "acme/x", "python")
    replay("{oops")(folder)
    spec = load_task(folder).spec
    oracle = oracle_of(folder, spec)
    step = check_cassettes(folder, spec, oracle)
    assert "its arguments are not JSON" in step.findings[0].message
    assert any("no record answers the oracle's call" in each.message for each in step.findings)
    (folder / "cassettes" / "prices.jsonl").write_text('{"kind": "call", "tool": "quote"}\n')
    step = check_cassettes(folder, spec, oracle)
    rules = [(finding.rule, finding.where) for finding in step.findings]
    assert rules == [("cassette-not-compared", "cassettes/: quote")]
