"""The import contracts of pyproject.toml bite: a planted violation breaks exactly its contract."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = "three floors"
RAY = "ray lives in"
TORCH = "no torch where"
CYCLES = "no cycles between rooms"

SKELETON = {
    "parl/rounds/loop.py": "import engine.light.engine\nimport sandbox.session\n",
    "parl/rllib/algorithm.py": "import ray\nimport parl.rounds.loop\n",
    "parl/actors.py": "import ray\n",
    "parl/sft/executors/ray_data.py": "import ray\n",
    "sandbox/session.py": "import infra.errors\n",
    "sandbox/pool.py": "",
    "sandbox/backends/ray.py": "import ray\n",
    "reward_models/episode.py": "",
    "reward_models/neural/model.py": "import torch\nimport infra.errors\n",
    "engine/light/engine.py": "import torch\nimport engine.runtime.types\n",
    "engine/runtime/types.py": "import infra.errors\n",
    "engine/actors.py": "import ray\nimport engine.light.engine\n",
    "infra/cluster/connect.py": "import ray\n",
    "infra/errors.py": "",
    "infra/log/setup.py": "",
}
"""The house in miniature: every arrow and every exception it allows."""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def broken(output: str) -> list[str]:
    """The report's lines of contracts that do not hold."""
    return [line for line in output.splitlines() if " BROKEN" in line]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A temporary tree of SKELETON under the real contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in SKELETON.items():
        plant(tmp_path, name, text)
    return tmp_path


def plant(root: Path, name: str, text: str) -> None:
    """Append ``text`` to the module, making its packages on the way."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.relative_to(root).parents:
        if parent != Path():
            (root / parent / "__init__.py").touch()
    with path.open("a") as file:
        file.write(text)


def test_everything_the_house_allows(house):
    """Downward arrows, ray and torch in their places: all contracts hold."""
    result = lint(house)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("contract", "name", "text"),
    [
        (FLOORS, "infra/log/setup.py", "import parl.rounds.loop"),
        (FLOORS, "infra/log/setup.py", "import reward_models.episode"),
        (FLOORS, "engine/light/engine.py", "import sandbox.session"),
        (FLOORS, "sandbox/session.py", "import reward_models.episode"),
        (FLOORS, "reward_models/episode.py", "import parl.rounds.loop"),
        (RAY, "parl/rounds/loop.py", "import ray"),
        (RAY, "sandbox/pool.py", "from ray import get"),
        (RAY, "engine/light/engine.py", "def f():\n    import ray.util"),
        (RAY, "infra/log/setup.py", "import ray"),
        (TORCH, "sandbox/pool.py", "import torch"),
        (TORCH, "infra/log/setup.py", "from torch import nn"),
        (TORCH, "reward_models/episode.py", "import torch"),
        (TORCH, "sandbox/pool.py", "def f():\n    import vllm"),
        (TORCH, "reward_models/neural/model.py", "import triton"),
        (CYCLES, "sandbox/session.py", "import sandbox.pool\n"),
        (CYCLES, "engine/runtime/types.py", "import engine.light.engine"),
    ],
)
def test_each_violation_breaks_its_contract(house, contract, name, text):
    """One planted import breaks one contract, whose name is printed, and the command fails."""
    plant(house, name, text + "\n")
    if contract is CYCLES:
        plant(house, "sandbox/pool.py", "import sandbox.session\n")
    result = lint(house)
    assert result.returncode == 1, result.stdout + result.stderr
    names = broken(result.stdout)
    assert any(line.startswith(contract) for line in names)
    # an import that goes up also closes a circle between the roots' rooms, never more than that
    assert {line.split(" ")[0] for line in names} <= {contract.split(" ")[0], CYCLES.split(" ")[0]}


def test_a_detour_does_not_help(house):
    """A torch-free package may not reach torch through a module of its own either."""
    plant(house, "infra/log/deep.py", "import torch\n")
    plant(house, "sandbox/session.py", "import infra.log.deep\n")
    result = lint(house)
    assert result.returncode == 1
    assert any(line.startswith(TORCH) for line in broken(result.stdout))


def test_this_tree_keeps_its_contracts():
    """The real packages obey."""
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout
