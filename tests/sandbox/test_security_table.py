"""docs/security.md: every row names a test that exists and runs at the levels it claims."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "a": "test_attacks.py",
    "k": "test_attacks_kernel.py",
    "v": "test_attacks_verifier.py",
    "b": "test_boxes.py",
    "e": "test_extract.py",
    "p": "test_pool.py",
    "d": "docker/test_docker.py",
}
ROW = re.compile(r"^\| (.+?) \| ([akvbepd]) `(test_\w+)` \| (.+) \|$", re.MULTILINE)
TEXT = (ROOT / "docs" / "security.md").read_text()
ROWS = ROW.findall(TEXT)
LISTS = {"BOXED": "docker A B", "JUDGED": "docker A B", "COUNTED": "docker A",
         "LEVELS": "docker A B C"}  # fmt: skip


def decorators(file: str, test: str) -> str:
    """What stands above a test."""
    source = (ROOT / "tests" / "sandbox" / file).read_text()
    head = source[: source.index(f"def {test}(")]
    return head[head.rindex("\n\n\n") :]


def test_the_table_is_read():
    """The pattern above meets every row of the table of attacks."""
    table = TEXT.split("## Attacks and tests")[1].split("\n## ")[0]
    assert len(ROWS) == sum(line.startswith("|") for line in table.splitlines()) - 2
    assert len({test for _, _, test, _ in ROWS}) == len(ROWS) >= 50


@pytest.mark.parametrize("row", ROWS, ids=[row[2] for row in ROWS])
def test_a_row_claims_no_more_than_its_test_runs(row: tuple[str, str, str, str]):
    """pass in a column = that level is among the test's parameters (host-side tests have none)."""
    _, key, test, results = row
    cells = dict(zip(("docker", "A", "B", "C"), results.split(" | "), strict=True))
    assert set(cells.values()) <= {"pass", "open", "n/a"}
    above = decorators(FILES[key], test)
    claimed = {level for level, cell in cells.items() if cell == "pass"}
    if "parametrize" in above and '"level"' in above:
        name = re.search(r'"level", (\w+)\)', above)
        assert name is not None, above
        assert claimed <= set(LISTS[name[1]].split())
    elif key == "d":
        assert claimed == {"docker"}
    else:
        assert key == "e", "only the host's side of a copy has no level"
