"""Backends over libraries that aren't here: what their entry points are given.

Fakes with the releases' signatures compute attention from it, which must be plain attention.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.flash_libraries import (
    flash_attn_varlen_func_2,
    flash_attn_varlen_func_4,
    flash_attn_with_kvcache_3,
    needs_block_tables,
    torch_flash_attention_forward,
)
from tests.plain_attention import plain_attention
from tests.tiny_models import Row, make_batch
from workers.attention.base import AttentionBackend, AttentionMetadata, build_inputs
from workers.attention.flash_attn import FlashAttention
from workers.attention.flash_kernels import FA2, FA3, FA4_BLACKWELL, FA4_HOPPER
from workers.attention.reference import ReferenceAttention
from workers.attention.torch_varlen import TorchVarlenAttention
from workers.config import CacheLayout, LayerCacheSpec
from workers.kv_cache import LayerCache, allocate
from workers.staging import Staging

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
BLOCK_SIZE = 4
HEADS, KV_HEADS, K_DIM = 4, 2, 8
PLAIN = {"scale": 0.4, "window": 0, "chunk": 0, "softcap": 0.0, "sinks": None}


@dataclass(frozen=True)
class Library:
    make: Callable[[bool], AttentionBackend]  # deterministic or not
    v_dim: int = K_DIM
    softcap: bool = True
    sinks: bool = False


def flash(kernel, function):
    return lambda deterministic: FlashAttention(kernel, function, deterministic=deterministic)


def varlen(deterministic: bool) -> TorchVarlenAttention:
    return TorchVarlenAttention(varlen_attn, deterministic=deterministic)


LIBRARIES = {
    "FA2": Library(flash(FA2, flash_attn_varlen_func_2)),
    "FA3": Library(flash(FA3, flash_attn_with_kvcache_3), v_dim=5),
    "FA4 on Hopper": Library(flash(FA4_HOPPER, flash_attn_varlen_func_4), v_dim=5, sinks=True),
    "FA4 on Blackwell": Library(
        flash(FA4_BLACKWELL, flash_attn_varlen_func_4), v_dim=5, sinks=True
    ),
    "torch": Library(varlen, softcap=False),
}
every_library = pytest.mark.parametrize(
    "library",
    [
        pytest.param(library, id=name, marks=needs_block_tables if name == "torch" else ())
        for name, library in LIBRARIES.items()
    ],
)


@pytest.fixture(autouse=True, scope="module")
def torch_kernel() -> Iterator[None]:
    """Torch's own checks and conversions run; only what is below them is ours."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", torch_flash_attention_forward, "CPU")
        yield


@dataclass(frozen=True)
class Layout:
    """How sequences are fed: `steps` has (from, to, first block of the table) of each of them."""

    tables: list[list[int]]  # of whole sequences
    steps: list[list[tuple[int, int, int]]]
    window: int
    slack: int  # by how much the step's longest are overstated, as in a CUDA graph


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    window = draw(st.sampled_from([0, 1, 3, 4, 6]))
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    num_steps = draw(st.integers(1, 4))
    blocks = draw(st.permutations(range(12)))
    tables, starts = [], [0] * len(lengths)
    for length in lengths:
        count = -(-length // BLOCK_SIZE)
        tables.append([blocks.pop() for _ in range(count)])
    steps = []
    for number in range(num_steps):
        step = []
        for index, length in enumerate(lengths):
            start = starts[index]
            end = length if number == num_steps - 1 else draw(st.integers(start, length))
            seen = max(0, start + 1 - window) if window else 0
            step.append((start, end, draw(st.integers(0, seen // BLOCK_SIZE))))
            starts[index] = end
        steps.append(step)
    return Layout(tables, steps, window, draw(st.integers(0, 3)))


@every_library
@pytest.mark.parametrize("deterministic", [False, True])
@settings(max_examples=30, deadline=None)
@given(layout=layouts(), has_softcap=st.booleans(), has_sinks=st.booleans())
def test_what_is_given_to_the_library_is_plain_attention(
    library, deterministic, layout, has_softcap, has_sinks
):
    backend = library.make(deterministic)
    generator = torch.Generator().manual_seed(0)
    texts = [
        [
            torch.randn(step[1], heads, dim, generator=generator)
            for heads, dim in ((HEADS, K_DIM), (KV_HEADS, K_DIM), (KV_HEADS, library.v_dim))
        ]
        for step in layout.steps[-1]
    ]
    asked = PLAIN | {
        "window": layout.window,
        "softcap": 2.0 if has_softcap and library.softcap else 0.0,
        "sinks": torch.randn(HEADS, generator=generator) if has_sinks and library.sinks else None,
    }
    cache = make_cache(library.v_dim)
    found = [[] for _ in texts]
    for step in layout.steps:
        fed = [index for index, (start, end, _) in enumerate(step) if end > start]
        if not fed:
            continue
        parts = [
            torch.cat([texts[index][kind][slice(*step[index][:2])] for index in fed])
            for kind in range(3)
        ]
        metadata = make_metadata([(*step[index], layout.tables[index]) for index in fed])
        metadata = replace(
            metadata,
            max_query_len=metadata.max_query_len + layout.slack,
            max_total_len=metadata.max_total_len + layout.slack,
        )

        with torch.inference_mode():
            # Heads before tokens, as models bring them.
            by_head = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
            output = backend.attend(*by_head, cache, metadata, **asked)

        assert output.is_contiguous()
        pieces = output.split([step[index][1] - step[index][0] for index in fed])
        for index, piece in zip(fed, pieces, strict=True):
            found[index].append(piece)

    for index, text in enumerate(texts):
        expected = plain_attention(*text, **asked)
        assert torch.allclose(torch.cat(found[index]), expected, atol=1e-5)


def make_cache(v_dim: int, device: torch.device = CPU) -> LayerCache:
    """One of two layers that share a pool of 12 blocks."""
    layer = LayerCacheSpec(
        window=0, num_kv_heads=KV_HEADS, k_dim=K_DIM, v_dim=v_dim, element_bytes=4
    )
    layout = CacheLayout(block_size=BLOCK_SIZE, num_blocks=12, groups=((0, 1),))
    caches, _ = allocate(
        [layer, layer], layout, dtype=torch.float32, device=device, available_bytes=1 << 20
    )
    caches[1].pool.fill_(1e9)
    return caches[1]


def make_metadata(rows: list[tuple[int, int, int, list[int]]]) -> AttentionMetadata:
    """Each row is fed from and to a place, with its whole table cut before `first`."""
    batch = make_batch(
        [
            Row(
                sequence_id=number,
                tokens=[0] * (end - start),
                seq_len=start,
                block_tables=[table[first:]],
                first_blocks=[first],
            )
            for number, (start, end, first, table) in enumerate(rows)
        ]
    )
    (metadata,) = build_inputs(batch, block_size=BLOCK_SIZE, staging=Staging(CPU)).groups
    return metadata


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        ), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def attend_without_numbers(backend: AttentionBackend, *, v_dim: int, window: int) -> torch.Tensor:
    """On tensors that have none: whoever reads one fails."""
    meta = torch.device("meta")
    metadata = make_metadata([(9, 12, 1, [5, 0, 7]), (14, 15, 2, [3, 6, 1, 2])])
    moved = {
        field.name: getattr(metadata, field.name).to(meta)
        for field in fields(metadata)
        if field.name not in ("host_lens", "max_query_len", "max_total_len")
    }
    parts = [
        torch.empty(4, heads, dim, device=meta)
        for heads, dim in ((HEADS, K_DIM), (KV_HEADS, K_DIM), (KV_HEADS, v_dim))
    ]
    with NoHostReads(), torch.inference_mode():
        return backend.attend(
            *parts,
            make_cache(v_dim, meta),
            replace(metadata, **moved),
            **PLAIN | {"window": window},
        )


def take_anything(q, **others) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], others["v" if "v" in others else "v_cache"].shape[3])


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "kernel",
    [FA2, FA3, FA4_HOPPER, FA4_BLACKWELL, pytest.param(None, id="torch", marks=needs_block_tables)],
)
def test_nothing_on_the_way_reads_the_device(kernel, deterministic, window):
    make = varlen if kernel is None else flash(kernel, take_anything)

    output = attend_without_numbers(make(deterministic), v_dim=K_DIM, window=window)

    assert output.shape == (4, HEADS, K_DIM)


def test_that_test_sees_who_reads():
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError), match=r"meta|waits"):
        attend_without_numbers(ReferenceAttention(), v_dim=K_DIM, window=5)


@pytest.mark.parametrize(
    ("kernel", "usually", "deterministic"),
    [(FA3, 0, 1), (FA4_HOPPER, 1, 1), (FA4_BLACKWELL, 0, 0)],
)
def test_keys_are_split_only_where_batches_may_matter(kernel, usually, deterministic):
    """Blackwell's FA4 is refused where they may not."""
    given = []

    def note(q, *, num_splits, **others):
        given.append(num_splits)
        return q

    for is_deterministic in (False, True):
        attend_without_numbers(flash(kernel, note)(is_deterministic), v_dim=K_DIM, window=0)

    assert given == [usually, deterministic]


def test_fa3_gets_the_same_bound_for_any_batch():
    given = []

    def note(q, *, max_seqlen_q, **others):
        given.append(max_seqlen_q)
        return q

    for is_deterministic in (False, True):
        attend_without_numbers(flash(FA3, note)(is_deterministic), v_dim=K_DIM, window=0)

    assert given == [3, 193]
