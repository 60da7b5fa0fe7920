"""Attention by the flash-attn libraries.

The one file that imports them, and only when it makes a backend.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workers.attention.base import AttentionMetadata, AttentionShape, UnsuitedError
from workers.attention.flash_kernels import FA2, FA3, FA4_BLACKWELL, FA4_HOPPER, Kernel
from workers.attention.limits import check_device
from workers.attention.paged_call import PagedCall
from workers.attention.write import write_kv
from workers.kv_cache import LayerCache

logger = logging.getLogger(__name__)

Function = Callable[..., Any]  # returns the tensor [T, Hq, V], or a tuple that begins with it


class FlashAttention:
    """One of the kernels, on the cache."""

    name = "flash_attn"
    takes_fp8_cache = False
    is_capturable = True

    def __init__(self, kernel: Kernel, function: Function, *, deterministic: bool) -> None:
        self.block_size_multiple = kernel.block_size_multiple
        self._arguments = kernel.arguments
        self._function = function
        self._deterministic = deterministic

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int,
        chunk: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As AttentionBackend says."""
        assert not chunk, "refused when the backend was made"
        write_kv(key, value, cache, metadata)
        call = PagedCall(
            query=query,
            cache=cache,
            metadata=metadata,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            deterministic=self._deterministic,
        )
        result = self._function(**self._arguments(call))
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        # FA2's layout is the query's, where heads may come before tokens.
        return output.contiguous()


def _load_2() -> Function:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


def _load_3() -> Function:
    from flash_attn_interface import flash_attn_with_kvcache

    return flash_attn_with_kvcache  # type: ignore[no-any-return]


def _load_4() -> Function:
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


# The newest first.
KERNELS: tuple[tuple[Kernel, Callable[[], Function]], ...] = (
    (FA4_BLACKWELL, _load_4),
    (FA4_HOPPER, _load_4),
    (FA3, _load_3),
    (FA2, _load_2),
)


def make(
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> FlashAttention:
    """Of the newest kernel that is installed and suits. Deterministic: the same in any batch.

    Raises UnsuitedError: there is none.
    """
    check_device(dtype, device)
    reasons: list[str] = []
    for kernel, load in KERNELS:
        try:
            kernel.limits.check(shapes, device, deterministic=deterministic)
            function = _find(kernel, load)
        except UnsuitedError as error:
            reasons.append(str(error))
            continue
        logger.info("flash_attn by %s (%s)", kernel.limits.kernel, "; ".join(reasons) or "newest")
        return FlashAttention(kernel, function, deterministic=deterministic)
    raise UnsuitedError("; ".join(reasons))


def _find(kernel: Kernel, load: Callable[[], Function]) -> Function:
    """Raises UnsuitedError: it isn't there, or of a release that can't be called like that."""
    name = kernel.limits.kernel
    try:
        function = load()
    except ModuleNotFoundError as error:
        raise UnsuitedError(f"{name} isn't installed ({error})") from error
    except ImportError as error:
        raise UnsuitedError(f"{name} can't be imported ({error})") from error
    missing = kernel.new_keywords - inspect.signature(function).parameters.keys()
    if missing:
        raise UnsuitedError(f"the {name} that is installed has no {', '.join(sorted(missing))}")
    return function
