"""Workers as Ray actors, on the nodes of a cluster or on this machine."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.machinery import PathFinder
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import protos
import workers
from runtime.cluster.base import OnDeath, WorkerAddress
from runtime.cluster.own_ray import connection, has_own_ray, own_ray
from runtime.errors import ConfigError, WorkerError
from workers.actor import ActorAddress, WorkerActor

logger = logging.getLogger(__name__)

# Copied from the driver where a node doesn't set them itself. None that differ between hosts, as
# addresses and interface names do.
ENVIRONMENT_PREFIXES = ("HF_", "NCCL_DEBUG", "OMP_", "TORCH_NCCL_")

# After this the user is told what the placement waits for.
PATIENCE_S = 5.0


class RayLauncher:
    """One actor a rank, in one placement group, packed on as few nodes as hold it.

    No code is shipped: every node needs `lockstep-serving` installed, in the same version.
    `address` is None for a Ray of our own on this machine, which `close` ends with all its files.
    """

    def __init__(
        self,
        *,
        token: str,
        address: str | None,
        device: str,
        startup_timeout_s: float,
        cluster_certs: str | None = None,
    ) -> None:
        self._token = token
        self._cluster_certs = cluster_certs
        self._address = address
        self._device = device
        self._startup_timeout_s = startup_timeout_s
        self._closing = threading.Event()
        self._cleanup = ExitStack()
        self._actors: list[Any] = []

    def launch(self, count: int) -> list[WorkerAddress]:
        """As Launcher.launch; ranks in the order of nodes, the driver's first, then of devices."""
        deadline = time.monotonic() + self._startup_timeout_s
        _refuse_shadows()
        self._cleanup.enter_context(_connected(self._address, count))
        group = self._place(count, deadline)
        actors = [self._make_actor(group, index) for index in range(count)]
        found = self._start(actors, deadline)
        here = ray.get_runtime_context().get_node_id()
        order = sorted(
            range(count),
            key=lambda i: (found[i].node != here, found[i].node, found[i].cuda_device),
        )
        self._actors = [actors[index] for index in order]
        return [
            WorkerAddress(
                rank=rank, node=found[index].node, host=found[index].host, port=found[index].port
            )
            for rank, index in enumerate(order)
        ]

    def watch(self, on_death: OnDeath) -> None:
        """As Launcher.watch: the end of an actor's `run` is its death notice."""
        for rank, actor in enumerate(self._actors):
            report = partial(self._report, rank, on_death)
            actor.run.remote().future().add_done_callback(report)

    def close(self) -> None:
        """As Launcher.close."""
        self._closing.set()
        self._cleanup.close()

    def _place(self, count: int, deadline: float) -> PlacementGroup:
        bundle = {"CPU": 1.0, "GPU": 1.0} if self._device == "cuda" else {"CPU": 1.0}
        group: PlacementGroup = placement_group([bundle] * count, strategy="PACK")
        # It would outlive the actors, its resources withheld.
        self._cleanup.callback(remove_placement_group, group)
        if group.wait(min(PATIENCE_S, _remaining(deadline))):
            return group
        lack = _describe_lack(bundle, count)
        logger.warning("waiting for Ray to place the workers: %s", lack)
        if not group.wait(_remaining(deadline)):
            raise ConfigError(
                f"Ray placed no workers within startup_timeout_s={self._startup_timeout_s:g}: "
                f"{lack}"
            )
        return group

    def _make_actor(self, group: PlacementGroup, index: int) -> Any:
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_restarts": 0,
            "max_task_retries": 0,
            # `run` takes one for good.
            "max_concurrency": 2,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        }
        if self._device == "cuda":
            options["num_gpus"] = 1
            # Ranks of one node must see each other's devices, to copy between them directly.
            variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            options["runtime_env"] = {"env_vars": variables}
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(ENVIRONMENT_PREFIXES)
        }
        log_level = logging.getLogger("workers").getEffectiveLevel()
        remote = ray.remote(WorkerActor).options(**options)
        actor: Any = remote.remote(environment, log_level, self._cluster_certs)
        self._cleanup.callback(ray.kill, actor, no_restart=True)
        return actor

    def _start(self, actors: list[Any], deadline: float) -> list[ActorAddress]:
        starting = [actor.start.remote(self._token) for actor in actors]
        try:
            found: list[ActorAddress] = ray.get(starting, timeout=_remaining(deadline))
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(
                f"the worker actors did not start within "
                f"startup_timeout_s={self._startup_timeout_s:g}"
            ) from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"a worker actor did not start: {error}") from error
        return found

    def _report(self, rank: int, on_death: OnDeath, ended: Any) -> None:
        if self._closing.is_set():
            return
        error = ended.exception()
        on_death(rank, "its actor ended" if error is None else _in_short(error))


@contextmanager
def _connected(address: str | None, count: int) -> Iterator[None]:
    """A connection to Ray; one that the process has already is used and left as it is."""
    if ray.is_initialized():
        if has_own_ray():
            raise ConfigError(
                "this process runs a Ray for another engine already, which ends with that one: "
                "close it first, or start a Ray for both and give its ray_address"
            )
        yield
    elif address is None:
        with own_ray(num_cpus=max(os.cpu_count() or 1, count)):
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
            stack.enter_context(
                connection(address=address, configure_logging=False, log_to_driver=True)
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"ray_address={address} can't be joined: {error}") from error
        yield


def _refuse_shadows() -> None:
    """Ray has its workers import from the driver's current folder first."""
    for name, ours in (("workers", workers), ("protos", protos)):
        found = PathFinder.find_spec(name, [os.getcwd()])
        if found is not None and found.origin is not None and found.origin != ours.__file__:
            raise ConfigError(
                f"the current folder has a package {name!r}, which Ray's workers would import in "
                "place of Lockstep's: start from another folder"
            )


def _in_short(error: BaseException) -> str:
    """On one line, without Ray's list of what might have been."""
    return " ".join(str(error).split()).partition(" Some common causes include")[0]


def _describe_lack(bundle: dict[str, float], count: int) -> str:
    available: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    wanted = " and ".join(f"{number * count:g} {name}" for name, number in bundle.items())
    there = ", ".join(
        f"{available.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in bundle
    )
    return f"{count} ranks want {wanted}; the cluster has {there}"


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
