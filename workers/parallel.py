"""Which ranks work together, what part of a tensor each holds, and how they exchange tensors."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from workers.config import WorkerConfig
from workers.device import choose_device
from workers.errors import CollectiveError, WorkerError
from workers.interface import VARIABLES, nccl_setting

# ProcessGroupGloo or ProcessGroupNCCL: torch's type stubs lack what both can do.
Group = Any

# Ranks wait for each other while one of them loads: the driver's deadlines end a wait, not this.
GROUP_TIMEOUT = timedelta(days=1)
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

    def __init__(
        self,
        topology: Topology,
        rank: int,
        group: Group | None,
        device: torch.device = CPU,
        *,
        is_ordered: bool = False,
    ) -> None:
        """`device` is where the group's tensors must be.

        With `is_ordered` sums go from rank to rank whatever the size, which costs tp times the
        traffic: else who adds what first depends on how many rows there are.
        """
        self.size = topology.tp
        self._device = device
        self.rank = rank
        self.is_sampler = rank == topology.sampler_rank
        self._sampler_rank = topology.sampler_rank
        self._group = group
        self._is_ordered = is_ordered

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks, written into `tensor`, which is contiguous."""
        group = self._group
        if group is None:
            return tensor
        if not self._is_ordered:
            _finish(lambda: group.allreduce([tensor]))
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        _finish(lambda: group.allgather([parts], [tensor]))
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor += part
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Joins the parts [..., n] to [..., size * n] on every rank."""
        group = self._group
        if group is None:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        _finish(lambda: group.allgather([parts], [tensor]))
        return torch.cat(parts, dim=-1)

    def gather_to_sampler(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Joins the parts [..., n] to [..., size * n] on the sampler's rank; None elsewhere."""
        group = self._group
        if group is None:
            return tensor
        tensor = tensor.contiguous()
        options = dist.GatherOptions()
        options.rootRank = self._sampler_rank
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_sampler else []
        _finish(lambda: group.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast_from_sampler(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the sampler's rank has in `tensor`, which is contiguous and overwritten elsewhere.

        With NCCL a CPU tensor travels by way of the device.
        """
        group = self._group
        if group is None or tensor.numel() == 0:
            return tensor
        sent = tensor.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = self._sampler_rank
        _finish(lambda: group.broadcast([sent], options))
        return sent.to(tensor.device)

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

        Not before all have loaded, which takes one rank longer than another. With gloo the
        driver's deadline for the step ends the wait.
        """
        if self._group is not None and self._device.type == "cuda":
            self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Leaves the group. May be called twice."""
        group, self._group = self._group, None
        # NCCL would wait until no CUDA graph has collectives in it; the process ends soon anyway.
        if group is not None and self._device.type != "cuda":
            group.shutdown()


def _finish(start: Callable[[], Any]) -> None:
    """Runs a collective. Raises CollectiveError: another rank is gone, or runs something else."""
    try:
        start().wait()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"a collective failed: {error}") from error


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
        return TensorParallel(
            topology,
            config.rank,
            _make_group(config, store),
            device=choose_device(config),
            is_ordered=config.deterministic,
        )
    except (dist.DistError, OSError, RuntimeError) as error:
        raise WorkerError(
            f"rank {config.rank} can't join the {config.tp_size} ranks at "
            f"{config.rendezvous_host}:{config.rendezvous_port}: {error}"
        ) from error


def _make_group(config: WorkerConfig, store: Store) -> Group:
    """A group of its own, not torch's default one: nothing is global, and epochs never mix."""
    if config.device == "cuda":
        if config.interface:
            # NCCL would take the first that it finds.
            os.environ[VARIABLES["cuda"]] = nccl_setting(config.interface, os.environ)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = GROUP_TIMEOUT
        return dist.ProcessGroupNCCL(store, config.rank, config.tp_size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = GROUP_TIMEOUT
    address = config.address or _own_address(config.rendezvous_host)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, config.rank, config.tp_size, gloo)


def _own_address(peer: str) -> str:
    """The address of this host that reaches `peer`; hosts with several networks have several."""
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing, only picks a route
        own: str = probe.getsockname()[0]
    return own
