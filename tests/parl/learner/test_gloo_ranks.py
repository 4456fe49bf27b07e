"""1, 2 and 4 learner ranks in real gloo processes take one and the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from tests.parl.learner.gloo_ranks import CASES, WORLD, work

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """[case][rank]"""
    folder = tmp_path_factory.mktemp("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(work, (str(folder),), nprocs=WORLD)  # pyright: ignore[reportPrivateImportUsage]
    ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return [[ranks[r][case] for r in range(count)] for case, (count, _) in enumerate(CASES)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{c}x{n}" for c, n in CASES])
def test_ranks_take_the_step_of_one(results: list[list[dict[str, Any]]], case: int):
    """Ragged lengths, unused experts, an idle rank in the last case: the gradient to 1e-5 and the
    update, in fp32 Newton-Schulz, to 1e-4 of their norms; all ranks hold the same parameters."""
    found = results[case]
    assert sum(rank["samples"] for rank in found) == CASES[case][1]
    assert min(rank["samples"] for rank in found) > 0 or case == 2
    for rank in found:
        assert rank["gradient"] < 1e-5 and rank["step"] < 1e-4, rank
        assert rank["sum"] == found[0]["sum"]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{c}x{n}" for c, n in CASES])
def test_shared_muon_has_the_bits_of_unshared(results: list[list[dict[str, Any]]], case: int):
    """Of the default bf16 Newton-Schulz; every rank makes the same collective calls, also one
    without a sample, and a step gathers once."""
    found = results[case]
    assert all(rank["same_bits"] for rank in found)
    assert all(rank["calls"] == found[0]["calls"] for rank in found)
    assert found[0]["calls"]["gather"] == 2


def test_a_rank_was_idle(results: list[list[dict[str, Any]]]):
    """Three samples for four ranks."""
    assert sorted(rank["samples"] for rank in results[2]) == [0, 1, 1, 1]
