"""The triton backend under triton's interpreter, against the reference backend."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.attention_steps import PagedStep, Step, feed_in_pieces
from tests.quick import quick
from workers.attention.cache_writes import write_kv
from workers.attention.reference import ReferenceAttention
from workers.attention.triton import MIN_SPLIT_KEYS, TritonAttention
from workers.kv_cache import LayerCache

pytestmark = pytest.mark.cpu

ATOL = {torch.float32: 1e-5, torch.float16: 4e-3}
# To shrink a step that fails takes minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
MANY = 1000  # multiprocessors: decode steps are split as far as their keys allow


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are too small to be shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_equals_reference(step: Step, **options: object) -> None:
    """Output near, and the pool bit for bit."""
    paged = PagedStep(step)
    expected, pool = paged.attend(ReferenceAttention(), paged.without_empty())

    output, same_pool = paged.attend(TritonAttention(**{"num_processors": MANY} | options))

    assert output.dtype == expected.dtype
    assert torch.allclose(output, expected, atol=ATOL[step.dtype], rtol=1e-3), (
        (output - expected).abs().max()
    )
    assert pool.view(torch.uint8).equal(same_pool.view(torch.uint8))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    block_size = draw(st.sampled_from([16, 32, 1, 4, 7, 48]))
    edges = [block_size, 2 * block_size, 64, 128]
    lengths = st.one_of(st.integers(0, 150), st.sampled_from(edges))
    fed = st.just(1) if draw(st.booleans()) else st.one_of(st.integers(0, 90), st.just(1))
    pairs = draw(st.lists(st.tuples(lengths, fed), min_size=1, max_size=4))
    kind = draw(st.sampled_from(["all", "window", "chunk"]))
    reach = draw(st.sampled_from([1, 5, 16, 33, 64, 100]))
    return Step(
        lengths=[*pairs, (draw(lengths), draw(st.integers(1, 3)))],
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 8)),
        k_dim=draw(st.sampled_from([64, 128, 256, 80, 96, 192, 6])),
        v_dim=draw(st.sampled_from([64, 128, 256, 80, 5])),
        window=reach if kind == "window" else 0,
        chunk=reach if kind == "chunk" else 0,
        softcap=draw(st.sampled_from([0.0, 2.0, 30.0])),
        has_sinks=draw(st.booleans()),
        block_size=block_size,
        drops_blocks=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=6, deadline=None, derandomize=True, phases=PHASES)
@given(steps(), st.booleans())
def test_steps_equal_the_reference(step: Step, deterministic: bool) -> None:
    check_equals_reference(step, deterministic=deterministic)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=800, deadline=None, phases=PHASES)
@given(steps(), st.booleans())
def test_many_steps_equal_the_reference(step: Step, deterministic: bool) -> None:
    check_equals_reference(step, deterministic=deterministic)


DECODING = Step(
    lengths=[(1200, 1), (0, 1), (511, 1), (300, 0), (64, 1)], group=3, k_dim=20, v_dim=9
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_sinks": True, "softcap": 2.0},
        {"window": 700, "drops_blocks": True},
        {"chunk": 640, "drops_blocks": True, "has_sinks": True},
        {"dtype": torch.float16, "block_size": 5},
    ],
)
@pytest.mark.parametrize("num_processors", quick([1, 15, 40], 15))
def test_split_decoding_equals_the_reference(changes, num_processors):
    """Into 1, 3 and 4 parts, or fewer where a window is short; short rows leave some empty."""
    check_equals_reference(replace(DECODING, **changes), num_processors=num_processors)


def test_decoding_is_split_by_bounds_alone():
    metadata = PagedStep(DECODING).metadata

    def splits(backend, *, max_query_len=1, max_total_len=1 << 15, reach=0):
        bounded = replace(metadata, max_query_len=max_query_len, max_total_len=max_total_len)
        return backend._num_splits(bounded, 2, reach)

    backend = TritonAttention(num_processors=132)

    assert splits(backend) == 2 * 132 // 10
    assert splits(backend, max_total_len=4 * MIN_SPLIT_KEYS) == 4
    assert splits(backend, reach=2 * MIN_SPLIT_KEYS) == 2
    assert splits(backend, max_total_len=17) == 1
    assert splits(backend, max_query_len=2) == 1
    assert splits(TritonAttention(num_processors=4)) == 1
    assert splits(TritonAttention(num_processors=132, deterministic=True)) == 1


@pytest.mark.parametrize("lengths", [[(40, 1), (3, 1), (0, 1)], [(40, 5), (3, 1), (0, 1)]])
def test_a_launch_may_be_for_more_than_the_step_brings(lengths):
    """Bounds are higher, sequences without a row follow, and there are rows of no sequence."""
    paged = PagedStep(Step(lengths=[*lengths, (0, 0), (7, 0)]))
    expected, pool = paged.attend(ReferenceAttention(), paged.without_empty())
    paged.query = torch.cat((paged.query, torch.full_like(paged.query[:2], float("nan"))))
    scratch = paged.metadata.slot_blocks.new_tensor(_unused_blocks(paged)[:1]).expand(2)
    paged.key, paged.value = (
        torch.cat((each, torch.full_like(each[:2], float("nan"))))
        for each in (paged.key, paged.value)
    )
    wide = replace(
        paged.metadata,
        slot_blocks=torch.cat((paged.metadata.slot_blocks, scratch)),
        slot_offsets=torch.nn.functional.pad(paged.metadata.slot_offsets, (0, 2)),
        max_query_len=max(fed for _, fed in lengths) * (1 if lengths[0][1] == 1 else 9),
        max_total_len=1 << 12,
    )

    output, same_pool = paged.attend(TritonAttention(num_processors=MANY), wide)

    assert torch.allclose(output[: len(expected)], expected, atol=1e-5)
    assert pool.view(torch.uint8).equal(same_pool.view(torch.uint8))


def _unused_blocks(paged: PagedStep) -> list[int]:
    used = {block for table in paged.tables for block in table}
    return [block for block in range(len(paged.cache.pool)) if block not in used]


SETTINGS = [
    {},
    {"window": 37},
    {"chunk": 48},
    {"softcap": 5.0, "has_sinks": True},
    {"dtype": torch.float16, "group": 3},
]


@pytest.fixture
def matmul_by_row(monkeypatch):
    """What the interpreter takes for tl.dot adds in an order that depends on a row's place.

    A GPU's matrix units don't; nor does this.
    """
    shapes = []

    def matmul(left: np.ndarray, right: np.ndarray, *, dtype: np.dtype) -> np.ndarray:
        shapes.append(left.shape)
        left, right = left.astype(dtype), right.astype(dtype)
        total = np.zeros((left.shape[0], right.shape[1]), dtype)
        for place in range(left.shape[1]):
            total += left[:, place : place + 1] * right[place]
        return total

    monkeypatch.setattr(np, "matmul", matmul)
    yield
    assert shapes


@pytest.mark.full
@pytest.mark.parametrize("changes", SETTINGS)
@pytest.mark.usefixtures("matmul_by_row")
def test_deterministic_bits_depend_on_the_sequence_alone(changes):
    """A prompt at once, in pieces, beside others, and token by token."""
    step = Step(lengths=[], group=2, k_dim=40, v_dim=24, block_size=8)
    step = replace(step, **changes)
    backend = TritonAttention(num_processors=MANY, deterministic=True)
    whole = feed_in_pieces(step, [90], backend)

    assert feed_in_pieces(step, [7, 64, 1, 18], backend).equal(whole)
    assert feed_in_pieces(step, [65, 1, 24], backend, mates=[9, 1, 70]).equal(whole)
    assert feed_in_pieces(step, [85, *[1] * 5], backend).equal(whole)


@pytest.mark.full
@pytest.mark.parametrize("changes", SETTINGS)
@pytest.mark.usefixtures("matmul_by_row")
def test_deterministic_bits_of_each_token_by_itself(changes):
    step = replace(Step(lengths=[], group=2, k_dim=40, v_dim=24, block_size=8), **changes)
    backend = TritonAttention(num_processors=MANY, deterministic=True)

    assert feed_in_pieces(step, [1] * 150, backend).equal(feed_in_pieces(step, [150], backend))


@pytest.mark.parametrize(("num_heads", "k_dim", "v_dim"), [(1, 64, 64), (3, 80, 5), (40, 100, 192)])
def test_write_kv_writes_the_slots_and_nothing_else(num_heads, k_dim, v_dim):
    step = Step(
        lengths=[(7, 12), (3, 1), (16, 16)],
        num_kv_heads=num_heads,
        group=1,
        k_dim=k_dim,
        v_dim=v_dim,
    )
    paged = PagedStep(step)
    expected = paged.attend(ReferenceAttention())[1]

    write_kv(paged.key, paged.value, paged.cache, paged.metadata)

    assert paged.cache.pool.view(torch.uint8).equal(expected.view(torch.uint8))


KERNELS = (
    "cache_writes.write_rows",
    "triton_kernels.attend_tiles",
    "triton_kernels.attend_splits",
    "triton_kernels.combine_splits",
)


class Recorder:
    """In a kernel's place."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None


@pytest.mark.parametrize(
    ("lengths", "launched"),
    [
        ([(1200, 1), (30, 1)], {"write_rows": 1, "attend_splits": 1, "combine_splits": 1}),
        ([(40, 7), (3, 1)], {"write_rows": 1, "attend_tiles": 1}),
    ],
)
def test_a_launch_reads_no_tensor(lengths, launched, monkeypatch):
    """On the meta device there is nothing to read; the host's lengths aren't there either."""
    paged = PagedStep(Step(lengths=lengths, has_sinks=True))
    metadata = paged.metadata
    tensors = {
        each.name: getattr(metadata, each.name).to("meta")
        for each in fields(metadata)
        if each.name not in ("host_lens", "max_query_len", "max_total_len")
    }
    metadata = replace(metadata, host_lens=None, **tensors)
    paged.query, paged.key, paged.value = (
        each.to("meta") for each in (paged.query, paged.key, paged.value)
    )
    paged.sinks = paged.sinks.to("meta")
    paged.cache = LayerCache(
        *(each.to("meta") for each in (paged.cache.key, paged.cache.value)),
        paged.cache.pool.to("meta"),
    )
    recorders = {name.rpartition(".")[2]: (name, Recorder()) for name in KERNELS}
    for name, recorder in recorders.values():
        monkeypatch.setattr(f"workers.attention.{name}", recorder)

    output, _ = paged.attend(TritonAttention(num_processors=MANY), metadata)

    assert output.shape == (len(paged.query), 4, 64)
    found = {name: len(each.grids) for name, (_, each) in recorders.items() if each.grids}
    assert found == launched
