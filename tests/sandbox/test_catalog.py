"""The shipped family: deterministic, split, solvable; and the folder it exports."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.catalog.base import Split
from sandbox.catalog.lookup_calc.family import LETTERS, LookupCalc, asked_keys
from sandbox.catalog.registry import get_family, list_families, list_tasks
from sandbox.errors import TaskError
from sandbox.fakes import InProcessSession
from sandbox.session import RawCall
from sandbox.task import TaskSpec, load_task

FAMILY = LookupCalc()


def content(spec: TaskSpec) -> tuple:
    """What the model reads and must write."""
    store = spec.environment.data["store"]
    asked = asked_keys(spec)
    return (spec.task_type, *asked, *(store[key] for key in asked))


def test_registry_lists_and_suggests():
    """Names without importing families; an unknown name lists the known and the nearest."""
    assert "lookup_calc" in list_families() and list_families() == sorted(list_families())
    assert {"lookup_calc/add", "lookup_calc/lookup"} <= set(list_tasks())
    assert get_family("lookup_calc").name == "lookup_calc"
    with pytest.raises(TaskError, match=r"known: .*lookup_calc.*; did you mean 'lookup_calc'"):
        get_family("lookup-calc")


def test_importing_the_registry_is_light():
    """A list of names must not cost pydantic, jsonschema_rs or a family."""
    code = (
        "import sys; import sandbox.catalog.registry as r; r.list_families(); "
        "sys.exit(bool({'jsonschema_rs', 'numpy', 'torch', 'ray', "
        "'sandbox.catalog.lookup_calc.family'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("task_type", FAMILY.task_types)
@pytest.mark.parametrize("letters", [LETTERS, LETTERS[:8]])
def test_train_and_heldout_share_nothing(task_type: str, letters: str):
    """No held-out (keys, values) is ever trained on, over several seeds."""
    family = LookupCalc(keys=letters)

    def drawn(split: Split, count: int) -> set[tuple]:
        keys = [(seed, index) for seed in (0, 1) for index in range(count)]
        return {content(family.instance(*key, split, task_type)) for key in keys}

    train, heldout = drawn("train", 1500), drawn("heldout", 500)
    assert not train & heldout
    assert len(heldout) > 10 and len(train) > 2 * len(heldout)


@pytest.mark.parametrize("task_type", FAMILY.task_types)
def test_instances_are_pure_functions_of_their_key(task_type: str):
    """Same key, same hash; another index, seed or split, another instance."""
    base = FAMILY.instance(7, 3, "train", task_type)
    assert LookupCalc().instance(7, 3, "train", task_type).content_hash == base.content_hash
    others = {
        FAMILY.instance(7, 4, "train", task_type).content_hash,
        FAMILY.instance(8, 3, "train", task_type).content_hash,
        FAMILY.instance(7, 3, "heldout", task_type).content_hash,
    }
    assert len(others | {base.content_hash}) == 4
    store = base.environment.data["store"]
    assert len(store) == 6 and set(asked_keys(base)) <= set(store)
    assert all(1 <= value <= 9 for value in store.values())
    assert TaskSpec.from_json(base.to_json()) == base


def test_the_draws_never_change():
    """Golden: stored runs name instances by (seed, index), so the draw is part of the format."""
    spec = LookupCalc(keys=LETTERS).instance(0, 0, "train", "add")
    assert spec.instruction == "add v j"
    assert spec.environment.data["store"] == {"v": 2, "j": 8, "y": 5, "g": 4, "i": 6, "z": 5}


def test_budget_and_minimum_tokens_are_set():
    """One call for a lookup, three for a sum; the token estimate is the caller's to set."""
    assert FAMILY.instance(0, 0, "train", "lookup").budget_units == {"calls": 1}
    assert FAMILY.instance(0, 0, "train", "add").budget_units == {"calls": 3}
    family = LookupCalc(min_tokens={"add": 7})
    assert family.instance(0, 0, "train", "add").min_tokens == 7
    with pytest.raises(TaskError, match="no task type 'sub'; known: lookup, add"):
        LookupCalc(min_tokens={"sub": 7})
    with pytest.raises(TaskError, match="6 or more different letters"):
        LookupCalc(keys="abcdea")
    with pytest.raises(TaskError, match="unknown split 'test'"):
        FAMILY.instance(0, 0, "test", "add")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("5+7", "12"),
        ("(2+3)*-4", "-20"),
        ("2*3 - 1", "5"),
        ("2**9", "tool_error: only integers, + - * and parentheses"),
        ("1/2", "tool_error: only integers, + - * and parentheses"),
        ("1.5", "tool_error: only integers, + - * and parentheses"),
        ("True", "tool_error: only integers, + - * and parentheses"),
        ("__import__('os')", "tool_error: only integers, + - * and parentheses"),
        ("999999999*999999999", "tool_error: a value is larger than 1000000000000"),
        ("(" * 150, "tool_error: not an expression"),
        ("1+" * 101, "tool_error: expression is longer than 200 characters"),
        ("5+", "tool_error: not an expression"),
        ("", "tool_error: not an expression"),
        ("1\x00", "tool_error: not an expression"),
    ],
)
def test_calculator_is_exact_and_safe(expression: str, answer: str):
    """Integers, + - * and parentheses; nothing else is evaluated."""

    async def go() -> str:
        session = InProcessSession(FAMILY.instance(0, 0, "train", "add"), FAMILY.bundle)
        await session.start()
        call = RawCall("functions.calc:0", json.dumps({"expression": expression}))
        return (await session.call(call)).text

    assert asyncio.run(go()) == answer


@pytest.mark.parametrize("task_type", FAMILY.task_types)
def test_exported_folder_is_harbor_and_loads_back(task_type: str, tmp_path: Path):
    """Every file Harbor needs is there, and our loader reads the same task."""
    spec = FAMILY.instance(1, 2, "heldout", task_type)
    folder = tmp_path / "task"
    FAMILY.export(spec, folder)
    for name in ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh",
                 "solution/solve.sh"):  # fmt: skip
        assert (folder / name).is_file()
    loaded = load_task(folder)
    assert loaded.spec.environment == spec.environment
    assert loaded.spec.verifier == spec.verifier
    assert (loaded.spec.name, loaded.spec.tools) == (spec.name, spec.tools)
    assert not loaded.bundle.trusted


def test_exported_folder_works_under_plain_harbor(tmp_path: Path):
    """Its image build, oracle and test.sh give reward 1; without an answer they give 0."""
    spec = FAMILY.instance(1, 2, "train", "add")
    folder = tmp_path / "task"
    FAMILY.export(spec, folder)
    app = tmp_path / "app"
    app.mkdir()
    build = folder / "environment" / "build_store.py"
    data = folder / "environment" / "data.json"
    subprocess.run([sys.executable, "-I", build, data, app / "store.db"], check=True)

    def reward() -> float:
        test = ["sh", folder / "tests/test.sh", app, folder / "tests", tmp_path / "logs"]
        subprocess.run(test, check=True)
        return json.loads((tmp_path / "logs" / "reward.json").read_text())["reward"]

    assert reward() == 0.0
    subprocess.run(["sh", folder / "solution/solve.sh", app], check=True)
    assert reward() == 1.0


def test_a_task_folder_cannot_read_the_host_through_links(tmp_path: Path):
    """A link out of the folder would carry a host file into a box."""
    folder = tmp_path / "task"
    FAMILY.export(FAMILY.instance(1, 2, "train", "lookup"), folder)
    (tmp_path / "secret.py").write_text("x = 1")
    (folder / "tools" / "tools.py").unlink()
    (folder / "tools" / "tools.py").symlink_to(tmp_path / "secret.py")
    with pytest.raises(TaskError, match="leads out of the task folder"):
        load_task(folder)
