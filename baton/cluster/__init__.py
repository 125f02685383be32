"""Local cluster: router, prefill and decode nodes as child processes."""

from baton.cluster.child import Child
from baton.cluster.local_cluster import (
    ClusterOptions,
    FurtherModel,
    LocalCluster,
    await_serving,
)
from baton.fork_server import ClusterFailed

__all__ = [
    "Child",
    "ClusterFailed",
    "ClusterOptions",
    "FurtherModel",
    "LocalCluster",
    "await_serving",
]
