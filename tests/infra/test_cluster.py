"""A local Ray cluster: environment of workers, placement, errors."""

import os

import pytest

from infra.cluster.config import ClusterConfig
from infra.cluster.connect import ClusterHandle, connect, shutdown
from infra.cluster.placement import place
from infra.errors import ClusterError
from infra.ports import free_port
from tests.clusters import local_cluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> ClusterHandle:
    return local_cluster(3, object_store_mib=80)


def test_workers_get_the_environment(cluster: ClusterHandle) -> None:
    """Worker processes run one thread each."""
    import ray

    @ray.remote
    def read(name: str) -> str | None:
        return os.environ.get(name)

    assert ray.get(read.remote("OMP_NUM_THREADS"), timeout=60) == "1"
    assert cluster.is_local and cluster.resources["CPU"] == 3


def test_second_connect_does_not_own(cluster: ClusterHandle) -> None:
    """Who did not connect does not disconnect."""
    import ray

    second = connect()
    assert second.was_connected
    second.shutdown()
    assert ray.is_initialized()


def test_bundles_are_reserved_by_name(cluster: ClusterHandle) -> None:
    """An actor runs in the bundle it names; removed bundles are free again."""
    import ray

    @ray.remote(num_cpus=1)
    class Actor:
        def bundle(self) -> str:
            group = ray.util.get_current_placement_group()
            return group.id.hex()

    placement = place(cluster, {"learner": {"CPU": 2}, "engine": {"CPU": 1}}, timeout_s=30)
    actor = Actor.options(**placement.options("engine")).remote()
    assert ray.get(actor.bundle.remote(), timeout=60) == placement.group.id.hex()
    placement.remove()
    place(cluster, {"all": {"CPU": 3}}, timeout_s=30).remove()


def test_bundle_that_no_node_holds_fails_at_once(cluster: ClusterHandle) -> None:
    """A local cluster cannot grow, so nothing is waited for."""
    with pytest.raises(ClusterError) as caught:
        place(cluster, {"small": {"CPU": 1}, "learner": {"CPU": 2, "GPU": 1}}, timeout_s=600)
    message = str(caught.value)
    assert message.startswith("bundle 'learner' (CPU 2, GPU 1) cannot be placed: no node is large")
    assert "the cluster has CPU 3 (" in message and "GPU 0 (0 free) on 1 node" in message


def test_bundles_that_do_not_fit_together_are_named(cluster: ClusterHandle) -> None:
    """Each fits a node, together they do not: the first without room is named after the wait."""
    with pytest.raises(ClusterError, match=r"bundle 'c' \(CPU 2\) cannot be placed: no room after"):
        place(cluster, {"a": {"CPU": 1}, "b": {"CPU": 1}, "c": {"CPU": 2}}, timeout_s=1)


def test_nobody_at_the_address() -> None:
    """A refused connection is told at once, with the remedy."""
    shutdown()
    port = free_port()
    with pytest.raises(
        ClusterError, match=rf"no Ray head node answers at 127.0.0.1:{port} .*ray st"
    ):
        connect(ClusterConfig(address=f"127.0.0.1:{port}"))
    with pytest.raises(ClusterError, match="expected host:port"):
        connect(ClusterConfig(address="127.0.0.1:x"))
