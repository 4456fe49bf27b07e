"""The weight store as a Ray actor: engines on any node fetch from it, restarts included."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from engine.errors import WeightsError
from tests.clusters import local_cluster
from tests.parl.weights.test_store import assert_same, make_weights

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def local_ray() -> None:
    local_cluster(2)


def test_an_engine_fetches_what_was_published_even_after_the_store_died(local_ray, tmp_path: Path):
    """A named version, the latest, an unknown one; then the actor is killed and reads from disk."""
    from parl.actors import FetchWeights, start_weight_store

    store = start_weight_store(tmp_path / "weights")
    fetch = FetchWeights(store, timeout_s=30)
    with pytest.raises(WeightsError, match="publish a version before engines start"):
        fetch(None)
    for version in (0, 1):
        assert ray.get(store.publish.remote(ray.put(make_weights(version)))) == version
    assert_same(fetch(), make_weights(1))
    assert_same(fetch(0), make_weights(0))
    with pytest.raises(WeightsError, match="version 7 is not in"):
        fetch(7)

    @ray.remote(num_cpus=0)
    def engine_start(fetch_weights):
        return fetch_weights(None).manifest.version

    assert ray.get(engine_start.remote(fetch)) == 1
    ray.kill(store, no_restart=False)
    assert_same(fetch(), make_weights(1))
    ray.kill(store)
    with pytest.raises(WeightsError, match="did not come from the weight store within 1 s"):
        FetchWeights(store, timeout_s=1)(0)
