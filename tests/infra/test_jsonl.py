"""JSON lines: strict JSON out of anything, several writers, a full disk."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.jsonl import JsonlFile, json_line, read_jsonl

ROOT = Path(__file__).parents[2]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


def strict(line: str) -> object:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


@given(
    st.dictionaries(
        st.text() | st.integers(),
        st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
        max_size=4,
    )
)
def test_every_line_is_strict_json(values: dict) -> None:
    """No NaN, no line break, whatever the values are."""
    line = json_line(values)
    assert "\n" not in line
    strict(line)


def test_numbers_of_numpy_are_numbers() -> None:
    """Scalars keep their value, what is not finite is null, other objects become text."""
    line = json_line(
        {"f": np.float32(0.5), "i": np.int64(3), "nan": np.float32("nan"), "p": Path("a"), (1,): 2}
    )
    assert strict(line) == {"f": 0.5, "i": 3, "nan": None, "p": "a", "(1,)": 2}


def test_processes_append_whole_lines(tmp_path: Path) -> None:
    """Lines of several processes do not mix."""
    path = tmp_path / "x.jsonl"
    code = """
import sys
from pathlib import Path
from infra.jsonl import JsonlFile
file = JsonlFile(Path(sys.argv[1]))
for i in range(300):
    file.append({"who": sys.argv[2], "i": i, "pad": "x" * 3000})
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(i)], cwd=ROOT)
        for i in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert sum(1 for _ in path.open()) == 900
    assert len(list(read_jsonl(path))) == 900


def test_full_disk_is_said_once_and_survived(capsys: pytest.CaptureFixture[str]) -> None:
    """Records that do not fit are dropped; the writer goes on."""
    file = JsonlFile(Path("/dev/full"))
    file.append({"a": 1})
    file.append({"a": 2})
    file.close()
    assert capsys.readouterr().err.count("record dropped: No space left on device") == 1


def test_torn_lines_are_passed_over_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader gets the whole records before and after, and hears what it does not get."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b\n{"a": 3}\n{"a"')
    assert [record["a"] for record in read_jsonl(path)] == [1, 3]
    assert capsys.readouterr().err == f"{path}: 1 torn lines passed over, the first is 2\n"


def test_a_last_line_that_is_being_written_is_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading a live file is normal and silent."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b')
    assert [record["a"] for record in read_jsonl(path)] == [1]
    assert capsys.readouterr().err == ""
