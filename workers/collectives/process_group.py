"""Collectives by torch.distributed: gloo between CPUs, NCCL between GPUs."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from workers.config import WorkerConfig
from workers.errors import CollectiveError
from workers.interface import VARIABLES, nccl_setting

# ProcessGroupGloo or ProcessGroupNCCL: torch's type stubs lack what both can do.
Group = Any

# Ranks wait for each other while one of them loads: the driver's deadlines end a wait, not this.
GROUP_TIMEOUT = timedelta(days=1)


class ProcessGroup:
    """Collectives of one group."""

    def __init__(
        self,
        group: Group,
        *,
        rank: int,
        size: int,
        sampler_rank: int,
        device: torch.device,
        is_ordered: bool,
    ) -> None:
        """`device` is where the group's tensors must be.

        With `is_ordered` sums go from rank to rank whatever the size, which costs `size` times the
        traffic: else who adds what first depends on how many rows there are.
        """
        self._group: Group | None = group
        self._size = size
        self._is_sampler = rank == sampler_rank
        self._sampler_rank = sampler_rank
        self._device = device
        self._is_ordered = is_ordered

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As Collectives says."""
        group = self._joined()
        if not self._is_ordered:
            _finish(lambda: group.allreduce([tensor]))
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        _finish(lambda: group.allgather([parts], [tensor]))
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor += part
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As Collectives says."""
        group = self._joined()
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        _finish(lambda: group.allgather([parts], [tensor]))
        return torch.cat(parts, dim=-1)

    def gather_to_sampler(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """As Collectives says."""
        group = self._joined()
        tensor = tensor.contiguous()
        options = dist.GatherOptions()
        options.rootRank = self._sampler_rank
        parts = [torch.empty_like(tensor) for _ in range(self._size)] if self._is_sampler else []
        _finish(lambda: group.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast_from_sampler(self, tensor: torch.Tensor) -> torch.Tensor:
        """As Collectives says. With NCCL a CPU tensor travels by way of the device."""
        group = self._joined()
        if tensor.numel() == 0:
            return tensor
        sent = tensor.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = self._sampler_rank
        _finish(lambda: group.broadcast([sent], options))
        return sent.to(tensor.device)

    def limit(self, timeout_s: float) -> None:
        """NCCL ends the process of a rank that waits longer for another.

        With gloo the driver's deadline for the step ends the wait.
        """
        if self._device.type == "cuda":
            self._joined()._set_default_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """As Collectives says."""
        group, self._group = self._group, None
        # NCCL would wait until no CUDA graph has collectives in it; the process ends soon anyway.
        if group is not None and self._device.type != "cuda":
            group.shutdown()

    def _joined(self) -> Group:
        if self._group is None:
            raise CollectiveError("this rank has left the group")
        return self._group


def _finish(start: Callable[[], Any]) -> None:
    """Runs a collective. Raises CollectiveError: another rank is gone, or runs something else."""
    try:
        start().wait()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"a collective failed: {error}") from error


def make_group(config: WorkerConfig, store: Store) -> Group:
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
