"""Attention by the flash attention 2 that torch has built in."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from workers.attention.base import AttentionMetadata, AttentionShape, UnsuitedError
from workers.attention.limits import SAME_DIMS, KernelLimits, check_device, same_dims
from workers.attention.paged_call import PagedCall, sums
from workers.attention.write import write_kv
from workers.kv_cache import LayerCache

LIMITS = KernelLimits(
    kernel="varlen_attn",
    capabilities=(8, 9, 10, 11, 12),
    takes_dims=same_dims,
    dims=SAME_DIMS,
    takes_softcap=False,
    takes_sinks=False,
)
FIRST_VERSION = TorchVersion("2.12")  # whose varlen_attn takes block tables
# Its documentation promises as much of num_splits=1. The kernels of 2.12 weren't read.
FIRST_DETERMINISTIC_VERSION = TorchVersion("2.13")


class TorchVarlenAttention:
    """`varlen_attn` with block tables.

    Deterministic, keys aren't split, and a sequence's results are the same in any batch. That
    holds for windows too: where blocks in front are given back, the rest moves by multiples of
    256 tokens, and those of a kernel's key tiles divide 256.
    """

    name = "torch_varlen"
    takes_fp8_cache = False
    block_size_multiple = 256
    is_capturable = True

    def __init__(self, varlen_attn: Callable[..., Any], *, deterministic: bool) -> None:
        self._varlen_attn = varlen_attn
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
        output: torch.Tensor = self._varlen_attn(**arguments(call))
        # Its layout is the query's, where heads may come before tokens.
        return output.contiguous()


def arguments(call: PagedCall) -> dict[str, object]:
    """Those of torch 2.13's varlen_attn.

    The cache is strided by blocks: the kernel goes by its strides, and wants the last one to be 1.
    `cu_seq_k` must be there, though the kernel goes by `seqused_k`.
    """
    assert call.sinks is None, "refused when the backend was made"
    assert not call.softcap, "refused when the backend was made"
    metadata = call.metadata
    key_lens = call.key_lens()
    return {
        "query": call.query,
        "key": call.cache.key,
        "value": call.cache.value,
        "cu_seq_q": metadata.query_starts,
        "cu_seq_k": sums(key_lens),
        "max_q": metadata.max_query_len,
        "max_k": metadata.max_total_len,
        "scale": call.scale,
        "window_size": _window(call),
        "enable_gqa": True,
        "seqused_k": key_lens,
        "block_table": metadata.block_tables,
        "num_splits": 1 if call.deterministic else None,
    }


def _window(call: PagedCall) -> tuple[int, int]:
    """Keys to the left of a query's own that it sees, and to the right; -1: all.

    A single query sees all keys that there are. The kernel packs heads and splits keys where no
    side is limited, which makes decode faster and its bits others.
    """
    if call.metadata.max_query_len == 1 and not call.window and not call.deterministic:
        return (-1, -1)
    return (call.window - 1, 0)


def make(
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> TorchVarlenAttention:
    """Raises UnsuitedError: torch is too old, or its kernel is not for these calls."""
    check_device(dtype, device)
    version = TorchVersion(torch.__version__)
    if version < FIRST_VERSION:
        raise UnsuitedError(
            f"torch {version}'s varlen_attn has no block tables: needs {FIRST_VERSION}"
        )
    if deterministic and version < FIRST_DETERMINISTIC_VERSION:
        needed = FIRST_DETERMINISTIC_VERSION
        raise UnsuitedError(f"torch {version}'s varlen_attn isn't deterministic: needs {needed}")
    LIMITS.check(shapes, device, deterministic=deterministic)
    from torch.nn.attention import current_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    other = current_flash_attention_impl()
    if other not in (None, "FA2"):
        raise UnsuitedError(f"{other} was put in place of torch's own flash attention")
    # It logs a line at INFO for each call: one for each layer of each step.
    logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)
    return TorchVarlenAttention(varlen_attn, deterministic=deterministic)
