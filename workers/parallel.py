"""Which ranks work together, what part of a tensor each holds, and how they exchange tensors."""

import socket
from dataclasses import dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from workers.collectives.base import Collectives
from workers.collectives.process_group import ProcessGroup, make_group
from workers.collectives.shared_memory import join_host
from workers.config import WorkerConfig
from workers.device import choose_device
from workers.errors import WorkerError

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How many ranks there are of each kind, and which one samples."""

    tp: int
    pp: int = 1
    ep: int = 1
    dp: int = 1
    sampler_rank: int = 0

    def __post_init__(self) -> None:
        for field in fields(self)[1:4]:
            size = getattr(self, field.name)
            if size != 1:
                raise WorkerError(
                    f"{field.name}={size} must be 1: only tensor parallelism (tp) is built"
                )
        if self.tp < 1:
            raise WorkerError(f"tp={self.tp} must be at least 1")
        if not 0 <= self.sampler_rank < self.tp:
            raise WorkerError(f"sampler_rank={self.sampler_rank} must be in [0, {self.tp})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The parts [start, stop) of dimension `dim` that a rank holds, zero-padded to `size`."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    size: int

    @property
    def stored(self) -> int:
        """Length of the parts together: what is read."""
        return sum(stop - start for start, stop in self.ranges)


class TensorParallel:
    """The ranks that hold one model together. No collective runs when there is one."""

    def __init__(self, topology: Topology, rank: int, collectives: Collectives | None) -> None:
        """`collectives` is None where nothing is exchanged."""
        self.size = topology.tp
        self.rank = rank
        self.is_sampler = rank == topology.sampler_rank
        self._collectives = collectives

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks, written into `tensor`, which is contiguous."""
        collectives = self._collectives
        return tensor if collectives is None else collectives.all_reduce(tensor)

    def all_agree(self, is_so: bool) -> bool:
        """Whether it is so on every rank: what follows may be collective. On the CPU."""
        return int(self.all_reduce(torch.tensor([float(is_so)]))) == self.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Joins the parts [..., n] to [..., size * n] on every rank."""
        collectives = self._collectives
        return tensor if collectives is None else collectives.all_gather(tensor)

    def gather_to_sampler(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Joins the parts [..., n] to [..., size * n] on the sampler's rank; None elsewhere."""
        collectives = self._collectives
        return tensor if collectives is None else collectives.gather_to_sampler(tensor)

    def broadcast_from_sampler(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the sampler's rank has in `tensor`, which is contiguous, overwritten elsewhere."""
        collectives = self._collectives
        return tensor if collectives is None else collectives.broadcast_from_sampler(tensor)

    def even_shard(self, dim: int, size: int) -> Shard:
        """The part of a dimension that divides by the number of ranks."""
        part = size // self.size
        return Shard(dim=dim, ranges=((self.rank * part, (self.rank + 1) * part),), size=part)

    def padded_shard(self, dim: int, size: int) -> Shard:
        """The part of a dimension that is padded until it divides."""
        part = -(-size // self.size)
        start = min(self.rank * part, size)
        return Shard(dim=dim, ranges=((start, min(start + part, size)),), size=part)

    def limit_collectives(self, timeout_s: float) -> None:
        """From now on: NCCL ends the process of a rank that waits longer for another.

        Not before all have loaded, which takes one rank longer than another. On CPUs the driver's
        deadline for the step ends the wait.
        """
        if self._collectives is not None:
            self._collectives.limit(timeout_s)

    def close(self) -> None:
        """Leaves the others. May be called twice."""
        if self._collectives is not None:
            self._collectives.close()


def open_rendezvous(world_size: int, host: str) -> tuple[TCPStore, int]:
    """Opens the store at which ranks find each other, on a port from the operating system.

    The caller keeps the store alive as long as the group. The store has no password: it listens
    at `host`, the address that the ranks use, and nowhere else.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def join(config: WorkerConfig, store: TCPStore | None) -> TensorParallel:
    """Meets the other ranks at `store`, or at the configured rendezvous where it is None.

    Raises WorkerError: the rendezvous or a rank can't be reached.
    """
    topology = Topology(tp=config.tp_size)
    if not 0 <= config.rank < config.tp_size:
        raise WorkerError(f"rank={config.rank} must be in [0, {config.tp_size})")
    if config.tp_size == 1:
        return TensorParallel(topology, config.rank, None)
    try:
        if store is None:
            store = TCPStore(
                config.rendezvous_host,
                config.rendezvous_port,
                config.tp_size,
                is_master=False,
                timeout=RENDEZVOUS_TIMEOUT,
            )
        return TensorParallel(topology, config.rank, _connect(config, topology, store))
    except (dist.DistError, OSError, RuntimeError) as error:
        raise WorkerError(
            f"rank {config.rank} can't join the {config.tp_size} ranks at "
            f"{config.rendezvous_host}:{config.rendezvous_port}: {error}"
        ) from error


def _connect(config: WorkerConfig, topology: Topology, store: Store) -> Collectives:
    """Through memory where all ranks are on this host, else by torch.distributed."""
    rank, size, sampler_rank = config.rank, topology.tp, topology.sampler_rank
    if config.device == "cpu":
        shared = join_host(store, rank=rank, size=size, sampler_rank=sampler_rank)
        if shared is not None:
            return shared
    return ProcessGroup(
        make_group(config, store),
        rank=rank,
        size=size,
        sampler_rank=sampler_rank,
        device=choose_device(config),
        is_ordered=config.deterministic,
    )
