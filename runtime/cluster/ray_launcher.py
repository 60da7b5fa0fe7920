"""Workers as Ray actors, on the nodes of a cluster or on this machine."""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.machinery import PathFinder
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import protos
import workers
from runtime.cluster.base import Death, OnDeath, WorkerAddress
from runtime.cluster.ray_nodes import (
    Wanted,
    check_bundles,
    describe_nodes,
    find_unreachable,
    other_than,
)
from runtime.errors import ConfigError, WorkerError
from workers.actor import ActorAddress, WorkerActor

logger = logging.getLogger(__name__)

# Copied from the driver where a node doesn't set them itself. None that differ between hosts, as
# addresses and interface names do.
ENVIRONMENT_PREFIXES = ("HF_", "LOCKSTEP_FAULTS", "NCCL_DEBUG", "OMP_", "TORCH_NCCL_")

# In what Ray says of an actor whose node is lost. Of a process it doesn't say how it ended.
NODE_DIED = ("its node has died", "its node is dead")

# After this the user is told what the placement waits for.
PATIENCE_S = 5.0


class RayLauncher:
    """One actor a rank, in one placement group; `placement` is one of Ray's strategies.

    Where the driver is an actor in a placement group itself, that is the one: the driver has its
    first bundle and the ranks the others. One of its own would stay if the driver is killed.

    The process is connected to Ray. No code is shipped: every node needs `lockstep-serving`
    installed, in the same version.
    """

    ends_workers = True

    def __init__(
        self,
        *,
        token: str,
        device: str,
        placement: str,
        startup_timeout_s: float,
        cluster_certs: str | None = None,
    ) -> None:
        self._token = token
        self._cluster_certs = cluster_certs
        self._device = device
        self._bundle = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
        self._strategy = placement.upper()
        self._startup_timeout_s = startup_timeout_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._cleanup = ExitStack()
        self._actors: list[Any] = []

    def launch(self, count: int) -> list[WorkerAddress]:
        """As Launcher.launch; ranks in the order of nodes, the driver's first, then of devices."""
        deadline = time.monotonic() + self._startup_timeout_s
        _refuse_shadows()
        wanted = Wanted(self._bundle, count, self._strategy)
        group, first = get_current_placement_group(), 1
        if group is None:
            group, first = self._place(wanted, deadline), 0
        else:
            check_bundles(group.bundle_specs, wanted)
        actors = [self._make_actor(group, first + index) for index in range(count)]
        found = self._start(actors, deadline)
        here = ray.get_runtime_context().get_node_id()
        order = rank_order(found, here)
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

    def close(self, *, at_once: bool = False) -> None:
        """As Launcher.close: Ray kills in any case."""
        with self._lock:
            self._closing.set()
        self._cleanup.close()

    def _place(self, wanted: Wanted, deadline: float) -> PlacementGroup:
        told = ""
        asked = self._cleanup.enter_context(ExitStack())
        group, avoided = None, frozenset[str]()
        while True:
            unreachable = find_unreachable()
            if group is None or unreachable != avoided:
                asked.close()
                group, avoided = self._ask(wanted, unreachable, asked), unreachable
            if group.wait(min(PATIENCE_S, _remaining(deadline))):
                return group
            lack = f"{wanted}; the nodes are {describe_nodes(wanted, unreachable)}"
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"Ray placed no workers within startup_timeout_s={self._startup_timeout_s:g}: "
                    f"{lack}"
                )
            if lack != told:
                logger.warning("waiting for Ray to place the workers: %s", lack)
                told = lack

    def _ask(
        self, wanted: Wanted, unreachable: frozenset[str], cleanup: ExitStack
    ) -> PlacementGroup:
        with self._open():
            group: PlacementGroup = placement_group(
                [wanted.bundle] * wanted.num_ranks,
                strategy=wanted.strategy,
                bundle_label_selector=[other_than(unreachable)] * wanted.num_ranks,
            )
            # It would outlive the actors, its resources withheld.
            cleanup.callback(remove_placement_group, group)
        return group

    @contextmanager
    def _open(self) -> Iterator[None]:
        """`close` comes before or after what is done in here, which is known to it then."""
        with self._lock:
            if self._closing.is_set():
                raise WorkerError("the launcher was closed while workers started")
            yield

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
        with self._open():
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
        if error is None:
            on_death(Death(rank, "its actor ended"))
            return
        cause = _in_short(error)
        on_death(Death(rank, cause, is_outside=died_with_its_node(cause)))


def rank_order(found: Sequence[ActorAddress], here: str) -> list[int]:
    """Which actor is which rank: node by node, the node `here` first, then by devices.

    Neighbours in a ring of ranks are then on one node as far as can be.
    """
    return sorted(
        range(len(found)),
        key=lambda i: (found[i].node != here, found[i].node, found[i].cuda_device),
    )


def died_with_its_node(cause: str) -> bool:
    """By what Ray says of an actor's death, which has the words of its errors in it."""
    return any(each in cause for each in NODE_DIED)


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


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
