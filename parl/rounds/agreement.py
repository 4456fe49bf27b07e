"""Do engine and learner still speak of the same policy? A run that goes on when they do not trains
on numbers that mean nothing (verl#4435, NeMo-RL#1212, prime-rl#3555)."""

from __future__ import annotations

from collections.abc import Sequence

from parl.errors import RoundError
from parl.learner.config import MismatchConfig
from parl.store.values import RoundInfo


def require_agreement(committed: Sequence[RoundInfo], config: MismatchConfig) -> None:
    """RoundError when the last ``patience`` of ``committed`` (training rounds, in order) were all
    above the gate. Read from the ledger, so that a resumed run stops as well."""
    last = committed[-config.patience :]
    if len(last) < config.patience:
        return
    values = [float(row.metrics.get("mismatch_kl", 0.0)) for row in last]
    if min(values) <= config.gate:
        return
    shown = ", ".join(f"{value:.4f}" for value in values)
    raise RoundError(
        f"engine and learner disagree: KL(engine || learner) was {shown} a token in rounds "
        f"{last[0].index} to {last[-1].index}, learner.mismatch.gate is {config.gate:g}; nothing "
        "is lost. Look at the engine's weight version, kernels and cache (parl rl show EPISODE), "
        "or begin a run with learner.loss.correction, or a higher gate if you know why"
    )
