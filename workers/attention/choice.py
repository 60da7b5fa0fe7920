"""Which attention backend serves a model on a device."""

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from workers.attention import flash_attn, torch_varlen
from workers.attention.base import AttentionBackend, AttentionShape, UnsuitedError
from workers.attention.reference import ReferenceAttention
from workers.errors import ModelError

logger = logging.getLogger(__name__)

# Makes the backend for a model's calls. Raises UnsuitedError.
Make = Callable[[Sequence[AttentionShape], torch.dtype, torch.device], AttentionBackend]


def _triton(
    shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    if find_spec("triton") is None:
        raise UnsuitedError("triton isn't installed")
    from workers.attention.triton import make

    return make(shapes, dtype, device)


def _reference(
    shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    return ReferenceAttention()


# The first that suits is taken. Each imports what it needs when it is made.
BACKENDS: dict[str, Make] = {
    "flash_attn": flash_attn.make,
    "torch_varlen": torch_varlen.make,
    "triton": _triton,
    "reference": _reference,
}
# Those that auto passes by elsewhere: a CPU has them for tests alone.
GPU_BACKENDS = frozenset({"triton"})


def choose(
    name: str, shapes: Sequence[AttentionShape], *, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """`name` is a backend's, or auto. `shapes` has one entry per attention call of the model.

    Raises ModelError: there is no such backend, or it doesn't suit.
    """
    if name != "auto":
        make = BACKENDS.get(name)
        if make is None:
            raise ModelError(f"attention={name} must be auto, {', '.join(BACKENDS)}")
        try:
            return make(shapes, dtype, device)
        except UnsuitedError as error:
            raise ModelError(
                f"attention={name} can't serve this: {error}; use attention=auto"
            ) from error
    reasons: list[str] = []
    for each, make in BACKENDS.items():
        if each in GPU_BACKENDS and device.type != "cuda":
            reasons.append(f"{each}: not on {device.type}")
            continue
        try:
            backend = make(shapes, dtype, device)
        except UnsuitedError as error:
            reasons.append(f"{each}: {error}")
            continue
        logger.info("attention backend %s (%s)", each, "; ".join(reasons) or "the first choice")
        return backend
    raise ModelError(f"no attention backend can serve this: {'; '.join(reasons)}")
