"""The toy table of facts 3.5: an ungated budget destroys the hard type, a gated one does not."""

from __future__ import annotations

import pytest

from reward_models.bench.toy import SCHEMES, Result, play

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Result]]:
    return {s.name: play(s, seed=0) for s in SCHEMES if not s.name.startswith("efficiency")}


def test_a_budget_without_a_gate_destroys_the_hard_type(results: dict[str, dict[str, Result]]):
    """Half of its accuracy, while the easy one only gets shorter."""
    free, forced = results["no budget"], results["budget always on"]
    assert forced["hard"].accuracy < 0.55 < 0.85 < free["hard"].accuracy
    assert forced["easy"].accuracy > 0.94 and forced["easy"].tokens < 0.5 * free["easy"].tokens


def test_a_gate_keeps_it(results: dict[str, dict[str, Result]]):
    """The easy type is as short, the hard one nearly as good as without a budget; hysteresis
    spares it most of the switching."""
    gated, plain = results["gate with hysteresis"], results["gate without hysteresis"]
    assert gated["easy"].tokens < 450 and gated["easy"].accuracy > 0.94
    assert gated["hard"].accuracy > 0.78 and gated["hard"].tokens > 1200
    assert gated["hard"].flips < plain["hard"].flips


def test_the_weight_means_nothing_under_std():
    """w = 0.2 and w = 1 give the same policy; under the mean, w = 0.2 leaves the hard type long.
    Means of three seeds: the mean scheme's lengths differ between them."""
    lengths = {
        scheme.name: sum(play(scheme, seed)["hard"].tokens for seed in range(3)) / 3
        for scheme in SCHEMES
        if scheme.name.startswith("efficiency")
    }
    small, large = lengths["efficiency w = 0.2, std"], lengths["efficiency w = 1.0, std"]
    assert small == pytest.approx(large, rel=0.1)
    assert lengths["efficiency w = 0.2, mean"] > 1.2 * small


def test_a_bonus_for_wrong_answers_buys_brevity_with_errors(
    results: dict[str, dict[str, Result]],
):
    """The easy type falls to the shortest length it is sometimes right at."""
    easy = results["length bonus for wrong ones too, std"]["easy"]
    assert easy.tokens < 300 and easy.accuracy < 0.93
