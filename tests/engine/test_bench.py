"""The bench of deterministic decoding runs and its cost stays small."""

import shutil

import pytest

from engine.bench.contexts import Shape
from engine.bench.deterministic import measure
from engine.bench.prefill import prefill
from tests.engine.tiny import MODEL


def test_deterministic_decoding_costs_less_than_half():
    """Smoke size on a loaded machine; the figure of the docs is for the demo's size."""
    report = measure(MODEL, num_contexts=48, prompt_length=20, num_tokens=15, num_repeats=2)
    assert report.ratio < 1.5


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_prefill_table_compares_with_full_attention():
    """Smoke size: two full paths, two hybrid ones, each with its ratio to the best full one."""
    lines = prefill(Shape(heads=4, groups=2, dim=32), length=512, num_repeats=1)
    assert [line.split(",")[0].strip() for line in lines[1:]] == ["full"] * 2 + ["hybrid"] * 2
    assert all("x the best full" in line for line in lines[1:])
    assert any(" 1.00 x" in line for line in lines)
