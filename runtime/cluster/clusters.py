"""Which cluster an engine's options name."""

import os

from runtime.cluster.base import Cluster
from runtime.cluster.local_launcher import LocalCluster
from runtime.config import EngineConfig


def open_cluster(config: EngineConfig) -> Cluster:
    """Nothing is started or joined before its first launcher."""
    # Actors start in another folder than ours.
    certs = config.cluster_certs and os.path.abspath(config.cluster_certs)
    if config.launcher == "local":
        return LocalCluster(startup_timeout_s=config.startup_timeout_s, cluster_certs=certs)
    # Here, not above: local workers need no Ray, and importing it takes a while.
    from runtime.cluster.ray_cluster import RayCluster

    return RayCluster(
        address=config.ray_address,
        num_ranks=config.tp,
        device=config.device,
        startup_timeout_s=config.startup_timeout_s,
        cluster_certs=certs,
    )
