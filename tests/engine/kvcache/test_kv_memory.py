"""The memory bench: really allocated bytes agree with the formula."""

from __future__ import annotations

import pytest

from engine.bench.kv_memory import MODELS, measure, savings
from engine.kvcache.config import TierConfig


@pytest.mark.parametrize(
    ("context", "chunk"),
    [(8192, 512), (12345, 512), pytest.param(131072, 64, marks=pytest.mark.slow)],
)
def test_used_bytes_are_the_formula(context: int, chunk: int):
    """Within 1 % by the slots in use, with a warm zone that is left behind at 8K; the pools as a
    whole, null slots and prefill room too, within 1 % at 128K."""
    warm = 65536 if context > 65536 else 2048
    measured = measure(context, TierConfig(warm=warm), key_dim=128, chunk=chunk)
    formula = measured.formula
    assert measured.used == pytest.approx(formula.device, rel=0.01)
    assert measured.host == formula.cold > 0
    if context == 131072:
        assert measured.allocated == pytest.approx(formula.device, rel=0.01)
        assert 1 - measured.allocated / measured.bf16 >= 0.71


def test_the_table_has_a_row_for_each_claim():
    """Printed numbers: 71 % at 128K by default."""
    lines = savings(MODELS["32 layers, 8 kv heads x 128"])
    default = next(line for line in lines if line.startswith("k8v8, hot"))
    assert default.split()[-2] == "71.7%"
