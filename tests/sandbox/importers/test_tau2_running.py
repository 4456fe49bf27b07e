"""A tau2 domain of upstream's shape runs with its own tools.py and is judged by its end state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sandbox.check.scripts import NOP, Script, oracle_of
from sandbox.importers.base import Imported
from sandbox.importers.registry import import_from
from sandbox.importers.small_models import BaseModel, Field, ValidationError
from sandbox.importers.tau2_sources import read_sources
from sandbox.session import RawCall
from sandbox.task import load_task
from tests.sandbox.importers.test_importers import FORMATS, scores

LIBRARY = FORMATS / "tau2" / "library"


def imported(tmp_path: Path, source: Path = LIBRARY) -> list[Imported]:
    return import_from("tau2", source, tmp_path / "out").tasks


def script(*calls: tuple[str, dict[str, Any]], answer: str = "1.5") -> Script:
    return Script(
        "test", tuple((RawCall(name, json.dumps(given)),) for name, given in calls), answer
    )


RETURN = ("return_loan", {"member_id": "m1", "loan_id": "l1"})
LEND = ("lend_book", {"member_id": "m1", "book_id": "b2"})


def test_the_end_state_decides_and_not_the_way(tmp_path: Path):
    """Other reads and another order pass; a change more, one less or no fee told does not."""
    folder = imported(tmp_path)[0].folder
    back = ("return_loan", {"member_id": "m1", "loan_id": "l2"})
    assert scores(
        folder,
        oracle_of(folder, load_task(folder).spec),
        script(("find_books", {"tag": "water"}), LEND, RETURN),
        NOP,
        script(RETURN),
        script(RETURN, LEND, back),
        script(RETURN, LEND, answer="no fee"),
    ) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_actions_count_where_the_basis_says_so(tmp_path: Path):
    """Also one that the world refuses."""
    folder = imported(tmp_path)[1].folder
    lend = ("lend_book", {"member_id": "m1", "book_id": "b1"})
    member = ("get_member", {"member_id": "m1"})
    assert scores(folder, script(member, lend), script(lend), script(member)) == [1.0, 0.0, 0.0]


def test_every_difference_is_said(tmp_path: Path):
    swap, refuse = imported(tmp_path)
    assert swap.downgrades == [
        "user simulator: the scenario is told in the instruction instead",
        "COMMUNICATE: the final answer counts, not every message",
        "ENV_ASSERTION: those of the user's side are not checked",
        "NL_ASSERTION: not checked",
        "utils.py is not beside tools.py: LIBRARY_DB_PATH is None",
        "pydantic: models are read by a small stand-in, Field's limits are not",
    ]
    assert len(refuse.downgrades) == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("from typing import Any, Dict, List", "import requests", "tools.py imports requests"),
        ("import BaseModel, Field", "import BaseModel, Field, field_validator",
         "data_model.py imports field_validator of pydantic"),
    ],
)  # fmt: skip
def test_what_a_box_cannot_run_is_recorded_instead(old: str, new: str, said: str, tmp_path: Path):
    """And the task says why."""
    source = tmp_path / "library"
    shutil.copytree(LIBRARY, source)
    for name in ("tools.py", "data_model.py"):
        path = source / name
        path.write_text(path.read_text().replace(old, new))
    assert read_sources(source).missing == [said]
    task = imported(tmp_path, source)[0]
    assert f"tools.py does not run in a box: {said}" in task.downgrades
    assert "DB: the writing calls are compared instead of the end state" in task.downgrades


class Inner(BaseModel):
    number: int
    word: str | None = None


class Outer(BaseModel):
    """Every kind of field that data bases use."""

    inner: Inner
    many: list[Inner] = Field(default_factory=list)
    named: dict[str, float | str] = {}  # noqa: RUF012 - as sources write it
    given: int = Field(3, alias="Given")


def test_models_are_read_checked_and_written():
    plain = {"inner": {"number": "4"}, "many": [{"number": 5.0}], "named": {"a": 1.5, "b": "x"},
             "Given": 7, "dropped": 1}  # fmt: skip
    made = Outer.model_validate(plain)
    assert made.inner.number == 4 and made.given == 7
    assert made.model_dump() == {
        "inner": {"number": 4, "word": None}, "many": [{"number": 5, "word": None}],
        "named": {"a": 1.5, "b": "x"}, "given": 7}  # fmt: skip
    assert Outer.model_validate(plain) == made and Outer(inner=made.inner).named == {}
    copied = made.model_copy(deep=True)
    copied.inner.number = 9
    assert made.inner.number == 4
    one = {"number": 1}
    wrong = [{}, {"inner": [1]}, {"inner": one, "many": {"a": 1}}]
    wrong += [{"inner": {"number": value}} for value in ("x", 1.5, True)]
    for value in wrong:
        with pytest.raises(ValidationError):
            Outer.model_validate(value)
