"""What every generated family promises: determinism, split, oracle, nop, echo, export."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.catalog.base import Split
from sandbox.catalog.generated import Accepts, Drawn
from sandbox.catalog.registry import get_family, list_tasks
from sandbox.errors import TaskError
from sandbox.task import TaskSpec, load_task
from tests.sandbox.catalog.playing import NAMES, family_of, oracle_agent, play

UNITS = {"pdf_report": "pdf_pages", "python_debug": "code_lines"}
OTHERS: list[tuple[int, int, Split]] = [(7, 4, "train"), (8, 3, "train"), (7, 3, "heldout")]
SLOW_WORLD = "ticket_root_cause"
"""Its setup takes seconds."""
QUICK = [pytest.param(n, marks=pytest.mark.slow) if n == SLOW_WORLD else n for n in NAMES]

HARBOR = [n if n == "python_debug" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
"""A Python a call: seconds."""


def test_the_catalog_holds_the_families_of_the_specification():
    """Each in Chinese and English, beside the two types of lookup_calc."""
    assert NAMES == [
        "contract_search", "excel_growth", "pdf_report", "python_debug", "ticket_root_cause",
        "weather_api",
    ]  # fmt: skip
    assert len(list_tasks()) == 2 + 2 * len(NAMES)
    assert "pdf_report/zh" in list_tasks()


@pytest.mark.parametrize("name", NAMES)
def test_an_instance_is_a_pure_function_of_its_key(name: str):
    """Two objects of the family draw the same; another key draws something else."""
    for task_type in family_of(name).task_types:
        base = family_of(name).instance(7, 3, "train", task_type)
        assert get_family(name).instance(7, 3, "train", task_type).content_hash == base.content_hash
        others = {
            family_of(name).instance(seed, index, split, task_type).content_hash
            for seed, index, split in OTHERS
        }
        assert len(others | {base.content_hash}) == 4
        assert TaskSpec.from_json(base.to_json()) == base


def identities(name: str, task_type: str, split: Split, count: int) -> set[str]:
    """Identity texts of instances, seen from outside of the split's rule."""
    seen: set[str] = set()

    class Recording(type(family_of(name))):
        def draw(self, draws, task_type: str, accepts: Accepts) -> Drawn | None:
            def spy(*texts: str) -> bool:
                taken = accepts(*texts)
                if taken:
                    seen.update(texts)
                return taken

            return super().draw(draws, task_type, spy)

    family = Recording()
    for index in range(count):
        family.instance(index % 3, index, split, task_type)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_train_and_heldout_share_nothing(name: str):
    """No content that is evaluated is ever trained on."""
    for task_type in family_of(name).task_types:
        train = identities(name, task_type, "train", 10)
        heldout = identities(name, task_type, "heldout", 6)
        assert len(heldout) >= 5 and len(train) >= 9
        assert not train & heldout


@pytest.mark.parametrize("name", NAMES)
def test_budget_language_and_estimates(name: str):
    """Units are counted, the floor is an estimate on the low side, the language is the type's."""
    for task_type in family_of(name).task_types:
        spec = family_of(name).instance(2, 0, "train", task_type)
        assert list(spec.budget_units) == [UNITS.get(name, "calls")]
        units = spec.budget_units[UNITS.get(name, "calls")]
        rate = {"pdf_pages": 120, "code_lines": 80, "calls": 40}[UNITS.get(name, "calls")]
        assert spec.min_tokens is not None
        assert 5 < spec.min_tokens < max(256.0, rate * units)
        assert bool(re.search("[\u4e00-\u9fff]", spec.instruction)) == (task_type == "zh")
        assert family_of(name).bundle.hash == spec.bundle
    custom = type(family_of(name))(min_tokens={"en": 7})
    assert custom.instance(2, 0, "train", "en").min_tokens == 7


@pytest.mark.parametrize("name", NAMES)
def test_bad_keys_are_refused(name: str):
    """Unknown type, unknown split, foreign and changed tasks."""
    family = family_of(name)
    with pytest.raises(TaskError, match="no task type 'fr'; known: en, zh"):
        family.instance(0, 0, "train", "fr")
    with pytest.raises(TaskError, match="unknown split 'test'"):
        family.instance(0, 0, "test", "en")  # type: ignore[arg-type]
    other = family_of("contract_search" if name != "contract_search" else "weather_api")
    with pytest.raises(TaskError, match="is no instance of"):
        family.oracle(other.instance(0, 0, "train", "en"))


def _check(name: str, keys: list[tuple[int, int, Split, str]]) -> None:
    """Oracle 1, nop 0 and echo 0 on every instance."""
    family = family_of(name)
    agents = []
    for key in keys:
        spec = family.instance(*key)
        agents += [oracle_agent(family, spec), (spec, (), ""), (spec, (), spec.instruction)]
    episodes = play(family, agents)
    for number, episode in enumerate(episodes):
        wanted = 1.0 if number % 3 == 0 else 0.0
        assert episode.verdict.error is None
        assert episode.verdict.correctness == wanted, (episode.spec.name, episode.verdict)
        assert episode.verdict.reasons
        for seen in episode.observations:
            assert seen.error is None and seen.stop is None, (episode.spec.name, seen)


@pytest.mark.parametrize("name", QUICK)
def test_oracle_solves_and_nothing_else_does(name: str):
    """In a real box: the oracle passes; an empty answer and the echoed instruction do not."""
    _check(name, [(0, 0, "train", "en"), (0, 1, "heldout", "zh")])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_oracle_solves_many(name: str):
    """Several seeds of each type and split."""
    count = 1 if name == SLOW_WORLD else 6
    splits: tuple[Split, ...] = ("train", "heldout")
    _check(name, [(11 + i, i, s, t) for i in range(count) for s in splits for t in ("en", "zh")])


@pytest.mark.parametrize("name", NAMES)
def test_exported_folder_loads_back(name: str, tmp_path: Path):
    """The Harbor folder holds the same task, with its packages, and no answer in the image."""
    family = family_of(name)
    spec = family.instance(1, 2, "heldout", "zh")
    family.export(spec, tmp_path / "task")
    loaded = load_task(tmp_path / "task")
    assert loaded.bundle.packages == family.packages
    assert loaded.bundle.tools_source == family.bundle.tools_source
    same = ("environment", "verifier", "instruction", "tools", "limits", "budget_units", "name")
    for key in (*same, "min_tokens", "seed", "task_type"):
        assert getattr(loaded.spec, key) == getattr(spec, key), key
    image = {path.name for path in (tmp_path / "task" / "environment").iterdir()}
    assert image == {"Dockerfile", "data.json", "tool.py", "toolkit.py", "tools.py"}
    dockerfile = (tmp_path / "task" / "environment" / "Dockerfile").read_text()
    assert all(f"{package}==" in dockerfile for package in family.packages)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", HARBOR)
def test_exported_folder_works_under_plain_harbor(name: str, tmp_path: Path):
    """World, oracle and test.sh as Harbor runs them, with this Python in place of the image's."""
    family = family_of(name)
    folder, app, logs = tmp_path / "task", tmp_path / "app", tmp_path / "logs"
    family.export(family.instance(1, 3, "train", "en"), folder)
    app.mkdir()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(*command: object) -> None:
        subprocess.run([str(part) for part in command], check=True, env=environment, timeout=100)

    def reward() -> float:
        run("sh", folder / "tests/test.sh", app, folder / "tests", logs)
        return json.loads((logs / "reward.json").read_text())["reward"]

    tool = folder / "environment" / "tool.py"
    run(sys.executable, "-I", tool, "--setup", folder / "environment/data.json", app)
    assert reward() == 0.0
    run("sh", folder / "solution/solve.sh", app, tool)
    assert reward() == 1.0
