"""The bench of deterministic decoding runs and its cost stays small."""

from engine.bench.deterministic import measure
from tests.engine.tiny import MODEL


def test_deterministic_decoding_costs_less_than_half():
    """Smoke size on a loaded machine; the figure of the docs is for the demo's size."""
    report = measure(MODEL, num_contexts=48, prompt_length=20, num_tokens=15, num_repeats=2)
    assert report.ratio < 1.5
