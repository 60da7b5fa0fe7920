"""Which cluster an engine's options name."""

import os

from runtime.cluster.base import Cluster
from runtime.cluster.local_launcher import LocalCluster
from runtime.cluster.static_launcher import StaticCluster
from runtime.cluster.worker_command import TOKEN_VARIABLE
from runtime.config import EngineConfig
from runtime.errors import ConfigError


def open_cluster(config: EngineConfig) -> Cluster:
    """Nothing is started or joined before its first launcher.

    Raises ConfigError: what the options name can't be used.
    """
    if config.launcher == "static":
        return StaticCluster(config, token=_static_token())
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
        placement=config.placement,
        startup_timeout_s=config.startup_timeout_s,
        cluster_certs=certs,
    )


def _static_token() -> str:
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: it is the token of the static workers")
    return token
