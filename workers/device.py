"""Where a rank computes: its device, and its share of the host's cores."""

import os

import torch

from workers.config import WorkerConfig
from workers.errors import ModelError


def default_threads(local_world_size: int) -> int:
    """A rank's share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def choose_device(config: WorkerConfig) -> torch.device:
    """Raises ModelError: there is no such device."""
    if config.device == "cpu":
        return torch.device("cpu")
    if config.device != "cuda":
        raise ModelError(f"device={config.device} must be cpu or cuda")
    if not torch.cuda.is_available():
        raise ModelError("device=cuda, but torch finds no CUDA device: use device=cpu")
    return torch.device("cuda", config.rank % torch.cuda.device_count())
