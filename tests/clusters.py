"""The local Ray cluster of this test process: one at a time, shared by the modules that fit it."""

from infra.cluster.config import ClusterConfig
from infra.cluster.connect import ClusterHandle, connect, shutdown

_live: dict[str, ClusterHandle] = {}


def local_cluster(num_cpus: int, object_store_mib: int = 120) -> ClusterHandle:
    """A local cluster of this size that answers; one of another size is ended first.

    Modules run in any order and in any process (pytest -n), so none may count on being the first
    to connect. Ray itself ends the last cluster with the process.
    """
    import ray

    key = f"{num_cpus} CPU, {object_store_mib} MiB"
    if ray.is_initialized() and key in _live:
        return _live[key]
    shutdown()
    _live.clear()
    _live[key] = connect(ClusterConfig(num_cpus=num_cpus, object_store_mib=object_store_mib))
    return _live[key]
