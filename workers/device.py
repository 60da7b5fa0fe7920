"""Where a rank computes: its device, and its share of the host's cores."""

import os

import torch

from workers.config import WorkerConfig
from workers.errors import ModelError


def default_threads(local_world_size: int) -> int:
    """A rank's share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def choose_device(config: WorkerConfig) -> torch.device:
    """On cuda the one that `use_cuda_device` made current.

    Raises ModelError: there is no such device.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if config.device != "cuda":
        raise ModelError(f"device={config.device} must be cpu or cuda")
    if not torch.cuda.is_available():
        raise ModelError("device=cuda, but torch finds no CUDA device: use device=cpu")
    return torch.device("cuda", torch.cuda.current_device())


def use_cuda_device(index: int) -> None:
    """Of the devices that this process sees; the launcher knows which one is this rank's.

    Raises ModelError: it doesn't see so many.
    """
    count = torch.cuda.device_count()
    if index >= count:
        raise ModelError(
            f"this rank is to compute on CUDA device {index}, but torch finds {count}: start no "
            "more ranks on a host than it has devices, or give each of them one"
        )
    torch.cuda.set_device(index)
