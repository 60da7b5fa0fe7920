"""Which attention backend serves a model on a device."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch

from workers.attention import flash_attn, native, torch_varlen
from workers.attention.base import AttentionBackend, AttentionShape, UnsuitedError
from workers.attention.reference import ReferenceAttention
from workers.errors import ModelError

logger = logging.getLogger(__name__)


class Make(Protocol):
    """Makes the backend for a model's calls."""

    def __call__(
        self,
        shapes: Sequence[AttentionShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool = False,
    ) -> AttentionBackend:
        """Where `deterministic` a query's bits depend on its sequence alone.

        Raises UnsuitedError: it can't.
        """
        ...


def _triton(
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> AttentionBackend:
    if find_spec("triton") is None:
        raise UnsuitedError("triton isn't installed")
    from workers.attention.triton import make

    return make(shapes, dtype, device, deterministic=deterministic)


def _reference(
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> AttentionBackend:
    return ReferenceAttention(deterministic=deterministic)


# The first that suits is taken. Each imports what it needs when it is made.
BACKENDS: dict[str, Make] = {
    "flash_attn": flash_attn.make,
    "torch_varlen": torch_varlen.make,
    "triton": _triton,
    "native": native.make,
    "reference": _reference,
}
# Those that auto passes by elsewhere: a CPU has them for tests alone.
GPU_BACKENDS = frozenset({"triton"})


def choose(
    name: str,
    shapes: Sequence[AttentionShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """`name` is a backend's, or auto. `shapes` has one entry per attention call of the model.

    The cache has `cache_dtype`; None is `dtype`.

    Raises ModelError: there is no such backend, or it doesn't suit.
    """
    if name != "auto":
        make = BACKENDS.get(name)
        if make is None:
            raise ModelError(f"attention={name} must be auto, {', '.join(BACKENDS)}")
        try:
            backend = make(shapes, dtype, device, deterministic=deterministic)
            return _check_cache(backend, dtype, cache_dtype)
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
            backend = make(shapes, dtype, device, deterministic=deterministic)
            _check_cache(backend, dtype, cache_dtype)
        except UnsuitedError as error:
            reasons.append(f"{each}: {error}")
            continue
        slow = device.type == "cuda" and each == "reference"
        level = logging.WARNING if slow else logging.INFO
        why = "; ".join(reasons) or "the first choice"
        logger.log(level, "attention backend %s%s (%s)", each, ", slow on a GPU" * slow, why)
        return backend
    raise ModelError(f"no attention backend can serve this: {'; '.join(reasons)}")


def _check_cache(
    backend: AttentionBackend, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> AttentionBackend:
    """Raises UnsuitedError: it can't read such a cache."""
    if cache_dtype not in (None, dtype) and not backend.takes_fp8_cache:
        raise UnsuitedError("it reads no KV cache in fp8")
    return backend
