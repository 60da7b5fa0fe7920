"""The Ray that workers run on: a cluster's, or one of our own on this machine."""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import ray

from runtime.cluster.own_ray import connection, has_own_ray, own_ray
from runtime.cluster.ray_launcher import RayLauncher
from runtime.errors import ConfigError


class RayCluster:
    """Joins Ray with its first launcher, and leaves it with `close`.

    `address` is None for a Ray of our own on this machine, which `close` ends with all its files.
    """

    def __init__(
        self,
        *,
        address: str | None,
        num_ranks: int,
        device: str,
        placement: str,
        startup_timeout_s: float,
        cluster_certs: str | None = None,
    ) -> None:
        self._address = address
        self._num_ranks = num_ranks
        self._device = device
        self._placement = placement
        self._startup_timeout_s = startup_timeout_s
        self._cluster_certs = cluster_certs
        self._is_joined = False
        self._cleanup = ExitStack()

    def token(self) -> str:
        """As Cluster.token."""
        return secrets.token_hex(32)

    def prepare(self, count: int) -> None:
        """As Cluster.prepare: nothing yet."""

    def launcher(self, token: str) -> RayLauncher:
        """As Cluster.launcher."""
        if not self._is_joined:
            self._cleanup.enter_context(
                _connected(self._address, self._num_ranks, self._startup_timeout_s)
            )
            self._is_joined = True
        return RayLauncher(
            token=token,
            device=self._device,
            placement=self._placement,
            startup_timeout_s=self._startup_timeout_s,
            cluster_certs=self._cluster_certs,
        )

    def close(self) -> None:
        """As Cluster.close."""
        self._cleanup.close()


@contextmanager
def _connected(address: str | None, count: int, startup_timeout_s: float) -> Iterator[None]:
    """A connection to Ray; one that the process has already is used and left as it is."""
    if ray.is_initialized():
        if has_own_ray():
            raise ConfigError(
                "this process runs a Ray for another engine already, which ends with that one: "
                "close it first, or start a Ray for both and give its ray_address"
            )
        yield
    elif address is None:
        num_cpus = max(os.cpu_count() or 1, count)
        with own_ray(num_cpus=num_cpus, startup_timeout_s=startup_timeout_s):
            yield
    else:
        with _joined(address):
            yield


@contextmanager
def _joined(address: str) -> Iterator[None]:
    if "://" in address:
        raise ConfigError(
            f"ray_address={address} must be host:port of the cluster's head: "
            "Ray Client can't tell which node the driver is on"
        )
    with ExitStack() as stack:
        try:
            stack.enter_context(connection(address=address))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"ray_address={address} can't be joined: {error}") from error
        yield
