"""Weights for an engine whose probabilities differ, and the gate that ends a run."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parl.errors import RoundError
from parl.learner.config import CorrectionConfig, MismatchConfig
from parl.learner.losses import LossTokens
from parl.learner.mismatch import correction_weights
from parl.rounds.agreement import require_agreement
from parl.store.values import RoundInfo

SEQUENCE = torch.tensor([0, 0, 0, 1, 1])
LOG_RHO = torch.tensor([0.0, 1.0, -1.0, 0.4, 0.4], dtype=torch.float64)


def weights(kind: str, log_rho: torch.Tensor = LOG_RHO, **bounds: float) -> list[float]:
    config = CorrectionConfig.model_validate({"kind": kind, **bounds})
    own = torch.full_like(log_rho, -2.0)
    tokens = LossTokens(own, own, torch.ones_like(own), SEQUENCE[: len(own)], 5.0, 2.0)
    found, dropped = correction_weights(tokens, own - log_rho, config)
    if found is None:
        assert kind == "none" and dropped == 0
        return []
    assert dropped == int((found == 0).sum())
    return found.tolist()


def test_by_hand() -> None:
    """rho = 1, e, 1/e and twice e^0.4; sequences with products 1 and e^0.8, means 1 and e^0.4."""
    e = math.e
    assert weights("none") == []
    assert weights("token_tis") == pytest.approx([1, 2, 1 / e, e**0.4, e**0.4])
    assert weights("sequence_tis") == pytest.approx([1, 1, 1, 2, 2])
    assert weights("icepop") == pytest.approx([1, 0, 0, e**0.4, e**0.4])
    assert weights("sequence_mask") == [1, 1, 1, 1, 1]
    assert weights("sequence_mask", high=1.4) == [1, 1, 1, 0, 0]


@given(st.lists(st.floats(-50, 50), min_size=5, max_size=5))
def test_no_weight_is_wild(values: list[float]) -> None:
    """Finite and within the bound, whatever the engine says."""
    log_rho = torch.tensor(values, dtype=torch.float64)
    for kind in ("token_tis", "sequence_tis", "icepop", "sequence_mask"):
        found = weights(kind, log_rho)
        assert all(0 <= w <= 2.0 + 1e-9 for w in found)


@given(st.lists(st.floats(-0.6, 0.6), min_size=5, max_size=5))
def test_an_engine_that_agrees_costs_nothing(values: list[float]) -> None:
    """rho near 1 inside the bounds: icepop and token_tis weigh by rho itself."""
    log_rho = torch.tensor(values, dtype=torch.float64)
    expected = log_rho.exp().tolist()
    assert weights("icepop", log_rho) == pytest.approx(expected)
    assert weights("token_tis", log_rho) == pytest.approx(expected)


def committed(*kls: float) -> list[RoundInfo]:
    made: list[RoundInfo] = []
    for index, kl in enumerate(kls):
        values: dict[str, Any] = {"phase": "train", "index": index, "status": "committed"}
        row = RoundInfo(
            **values,
            stage=0,
            weight_version_in=index,
            weight_version_out=index + 1,
            checkpoint_path=None,
            checkpoint_hash=None,
            metrics={"mismatch_kl": kl},
            started_at=time.time(),
            finished_at=None,
        )
        made.append(row)
    return made


def test_a_run_stops_when_engine_and_learner_part() -> None:
    """Three rounds in a row above the gate; two, or a quiet one between them, do not."""
    config = MismatchConfig()
    for fine in ([], [0.9, 0.9], [0.9, 0.001, 0.9, 0.9], [0.001] * 9):
        require_agreement(committed(*fine), config)
    with pytest.raises(RoundError, match=r"was 0\.0200, 0\.0300, 0\.0400 a token in rounds 1 to 3"):
        require_agreement(committed(0.001, 0.02, 0.03, 0.04), config)
    patient = config.model_copy(update={"patience": 4})
    require_agreement(committed(0.001, 0.02, 0.03, 0.04), patient)


def test_rounds_of_before_the_metric_are_no_evidence() -> None:
    rows = [replace(row, metrics={}) for row in committed(1.0, 1.0, 1.0)]
    require_agreement(rows, MismatchConfig())
