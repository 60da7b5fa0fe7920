"""The C kernel against plain attention, over drawn steps; and that a row's bits are its own."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plain_attention import plain_attention
from tests.tiny_models import Row, make_batch
from workers.attention import choice, native
from workers.attention.base import AttentionShape, UnsuitedError, build_inputs
from workers.attention.reference import ReferenceAttention
from workers.config import CacheLayout, LayerCacheSpec
from workers.kv_cache import LayerCache, allocate
from workers.native import build
from workers.native.calls import load_kernels
from workers.staging import Staging

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        not load_kernels("attention").has_vectors(), reason="the kernel wants AVX-512 or AVX2"
    ),
]

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

reaches = st.one_of(
    st.just({}),
    st.integers(1, 70).map(lambda window: {"window": window}),
    st.integers(1, 70).map(lambda chunk: {"chunk": chunk}),
)
shapes = st.builds(
    lambda kv_heads, shared, dims, reach, softcap, sinks: AttentionShape(
        num_heads=kv_heads * shared,
        num_kv_heads=kv_heads,
        k_dim=dims[0],
        v_dim=dims[1],
        scale=dims[0] ** -0.5,
        softcap=softcap,
        has_sinks=sinks,
        **reach,
    ),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 8, 50]),
    st.sampled_from([(16, 16), (64, 64), (128, 128), (256, 256), (96, 48)]),
    reaches,
    st.sampled_from([0.0, 0.0, 5.0]),
    st.booleans(),
)


class Texts:
    """Sequences of random queries, keys and values, and the cache that they are fed to."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, lengths: list[int], block_size: int
    ) -> None:
        self.shape, self.dtype, self.block_size = shape, dtype, block_size
        generator = torch.Generator().manual_seed(sum(lengths))
        sizes = (
            (shape.num_heads, shape.k_dim),
            (shape.num_kv_heads, shape.k_dim),
            (shape.num_kv_heads, shape.v_dim),
        )
        self.texts = [
            [torch.randn(length, *size, generator=generator).to(dtype) for size in sizes]
            for length in lengths
        ]
        self.sinks = torch.randn(shape.num_heads, generator=generator) if shape.has_sinks else None
        widths = [-(-length // block_size) for length in lengths]
        blocks = list(range(sum(widths) + 1))
        random.Random(sum(lengths)).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(width)] for width in widths]
        self.num_blocks = sum(widths) + 1
        self.cache = self._cache()
        self.settings = {
            "scale": shape.scale,
            "window": shape.window,
            "chunk": shape.chunk,
            "softcap": shape.softcap,
        }

    def _cache(self) -> LayerCache:
        """Between two other layers; what nobody wrote is no number."""
        layer = LayerCacheSpec(
            window=0,
            num_kv_heads=self.shape.num_kv_heads,
            k_dim=self.shape.k_dim,
            v_dim=self.shape.v_dim,
            element_bytes=self.dtype.itemsize,
        )
        layout = CacheLayout(
            block_size=self.block_size, num_blocks=self.num_blocks, groups=((0, 1, 2),)
        )
        caches, _ = allocate(
            [layer] * 3, layout, dtype=self.dtype, device=CPU, available_bytes=1 << 32
        )
        caches[1].pool.fill_(float("nan"))
        return caches[1]

    def feed(self, backend: object, *pieces: tuple[int, int, int]) -> list[torch.Tensor]:
        """Tokens [start, end) of sequences, in one step; what each gets."""
        batch = make_batch([self._row(*piece) for piece in pieces])
        (metadata,) = build_inputs(batch, block_size=self.block_size, staging=Staging(CPU)).groups
        parts = [
            torch.cat([self.texts[i][kind][start:end] for i, start, end in pieces])
            for kind in range(3)
        ]
        output = backend.attend(*parts, self.cache, metadata, **self.settings, sinks=self.sinks)
        assert output.is_contiguous()
        return list(output.split([end - start for _, start, end in pieces]))

    def _row(self, i: int, start: int, end: int) -> Row:
        """Blocks that nothing sees any more are left out."""
        seen = 0
        if self.shape.chunk:
            seen = start // self.shape.chunk * self.shape.chunk
        elif self.shape.window:
            seen = max(0, start + 1 - self.shape.window)
        first = seen // self.block_size
        return Row(
            sequence_id=i,
            tokens=[0] * (end - start),
            seq_len=start,
            block_tables=[self.tables[i][first:]],
            first_blocks=[first],
        )

    def expected(self, i: int) -> torch.Tensor:
        sinks = None if self.sinks is None else self.sinks.double()
        return plain_attention(
            *(part.double() for part in self.texts[i]), **self.settings, sinks=sinks
        )


def make(shape: AttentionShape, dtype: torch.dtype, **options: bool) -> native.NativeAttention:
    return native.make([shape], dtype, CPU, **options)


@settings(max_examples=30, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from([*BOUNDS]),
    block_size=st.sampled_from([1, 4, 16, 32]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_drawn_steps_equal_plain_attention(
    shape: AttentionShape, dtype: torch.dtype, block_size: int, lengths: list[int], seed: int
) -> None:
    texts = Texts(shape, dtype, lengths, block_size)
    backend, draw = make(shape, dtype), random.Random(seed)
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    while any(a < b for a, b in zip(done, lengths, strict=True)):
        pieces = []
        for i, length in enumerate(lengths):
            size = draw.choice([0, 1, 1, 7, 40, length])
            end = min(length, done[i] + size)
            if end > done[i]:
                pieces.append((i, done[i], end))
                done[i] = end
        if pieces:
            for (i, *_), output in zip(pieces, texts.feed(backend, *pieces), strict=True):
                found[i].append(output)

    for i, outputs in enumerate(found):
        expected = texts.expected(i)
        error = (torch.cat(outputs).double() - expected).abs().max()
        assert error <= BOUNDS[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [*BOUNDS])
@pytest.mark.parametrize("reach", [{}, {"window": 37}, {"chunk": 48}])
def test_bits_depend_on_nothing_but_the_sequence(dtype: torch.dtype, reach: dict[str, int]) -> None:
    """A prompt at once, in chunks, token by token, beside others: the same bits."""
    shape = AttentionShape(num_heads=6, num_kv_heads=2, k_dim=64, v_dim=64, scale=0.1, **reach)
    backend = make(shape, dtype, deterministic=True)
    texts = Texts(shape, dtype, [131, 90], backend.block_size_multiple)

    whole = texts.feed(backend, (0, 0, 131))[0]
    chunks = [texts.feed(backend, (0, s, min(s + 29, 131)))[0] for s in range(0, 131, 29)]
    steps = []
    for place in range(131):
        pieces = [(0, place, place + 1)]
        if place < 90:
            pieces.insert(0, (1, place, min(place + 5, 90)))
        steps.append(texts.feed(backend, *pieces)[-1])

    assert torch.cat(chunks).equal(whole)
    assert torch.cat(steps).equal(whole)


def test_the_cache_is_what_the_reference_writes() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, k_dim=32, v_dim=16, scale=0.1)
    pools = []
    for backend in (make(shape, torch.bfloat16), ReferenceAttention()):
        texts = Texts(shape, torch.bfloat16, [40, 7], 16)
        texts.feed(backend, (0, 0, 33), (1, 0, 7))
        pools.append(texts.cache.pool.nan_to_num(nan=77.0))
    assert pools[0].equal(pools[1])


def test_a_damaged_sequence_damages_no_other() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, k_dim=32, v_dim=32, scale=0.1)
    texts = Texts(shape, torch.float32, [40, 40], 16)
    texts.texts[0][2][5] = float("nan")
    damaged, sound = texts.feed(make(shape, torch.float32), (0, 0, 40), (1, 0, 40))
    assert damaged[:5].isfinite().all()
    assert damaged[5:].isnan().all()
    assert sound.isfinite().all()


@pytest.mark.parametrize("places", [[each] for each in range(18)] + [[*range(16)], [*range(40)]])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_damaged_keys_show(places: list[int], has_sinks: bool) -> None:
    """Wherever they are among those of a vector."""
    shape = AttentionShape(
        num_heads=4, num_kv_heads=2, k_dim=32, v_dim=32, scale=0.1, has_sinks=has_sinks
    )
    texts = Texts(shape, torch.float32, [40], 16)
    texts.texts[0][1][places] = float("nan")
    backend = make(shape, torch.float32)
    texts.feed(backend, (0, 0, 39))
    (last,) = texts.feed(backend, (0, 39, 40))
    assert last.isnan().all()


def test_other_numbers_than_the_caches_are_converted() -> None:
    """Some models compute parts in float32."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, k_dim=32, v_dim=32, scale=0.1)
    texts = Texts(shape, torch.bfloat16, [40], 16)
    (expected,) = texts.feed(make(shape, torch.bfloat16), (0, 0, 40))
    texts.texts[0] = [part.float() for part in texts.texts[0]]
    (found,) = texts.feed(make(shape, torch.bfloat16), (0, 0, 40))
    assert found.dtype == torch.float32
    assert found.equal(expected.float())


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [
        ({"k_dim": 24}, torch.float32, "head dim 24 is no multiple of 16"),
        ({"v_dim": 528}, torch.float32, "head dim 528 is no multiple of 16 that is at most 512"),
        ({"num_heads": 129}, torch.float32, "more than 128 query heads"),
        ({}, torch.float16, "it takes float32 and bfloat16, not torch.float16"),
    ],
)
def test_what_it_does_not_take(changes: dict[str, int], dtype: torch.dtype, said: str) -> None:
    sizes = {"num_heads": 1, "num_kv_heads": 1, "k_dim": 16, "v_dim": 16} | changes
    with pytest.raises(UnsuitedError, match=said):
        native.make([AttentionShape(**sizes, scale=1.0)], dtype, CPU)


def test_without_a_compiler_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    caplog.set_level("INFO")
    shape = AttentionShape(num_heads=1, num_kv_heads=1, k_dim=16, v_dim=16, scale=1.0)

    backend = choice.choose("auto", [shape], dtype=torch.float32, device=CPU)

    assert backend.name == "reference"
    assert "native: there is no C compiler: install gcc" in caplog.text


@pytest.mark.parametrize("cache", ["/dev/null", "/proc"])
def test_a_folder_that_cannot_be_used_is_no_end(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    shape = AttentionShape(num_heads=1, num_kv_heads=1, k_dim=16, v_dim=16, scale=1.0)
    with pytest.raises(UnsuitedError, match=r"can't be made or used .*XDG_CACHE_HOME"):
        make(shape, torch.float32)
    assert choice.choose("auto", [shape], dtype=torch.float32, device=CPU).name == "reference"


def test_a_damaged_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a full disk leaves it."""
    whole, damaged = (tmp_path / name / "lockstep" / "native" for name in ("whole", "damaged"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "whole"))
    build.load("collectives")
    (made,) = whole.iterdir()
    damaged.mkdir(parents=True)
    (damaged / made.name).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "damaged"))
    with pytest.raises(build.NoCompilerError, match=rf"{made.name} can't be made or used .*remove"):
        build.load("collectives")


def test_narrow_vectors_leave_it_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = tuple(flag.replace("native", "x86-64") for flag in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", narrow)
    shape = AttentionShape(num_heads=1, num_kv_heads=1, k_dim=16, v_dim=16, scale=1.0)
    with pytest.raises(UnsuitedError, match="neither AVX-512 nor AVX2"):
        make(shape, torch.float32)


def test_a_compiler_may_have_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc -g0")
    assert load_kernels("attention").has_vectors() in (0, 1)


def test_a_source_that_does_not_compile_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.c").write_text("int broken(void) { return undeclared; }\n")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.NoCompilerError, match=r"(?s)can't compile broken\.c: .*undeclared"):
        build.load("broken")
    assert list((tmp_path / "lockstep" / "native").iterdir()) == []


def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And again once its source changes, or what it is compiled with."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return ANSWER; }\n")
    made = tmp_path / "lockstep" / "native"

    assert build.load("answer", ["ANSWER=42"]).answer() == 42
    (first,) = made.iterdir()
    before = first.stat().st_mtime_ns
    assert build.load("answer", ["ANSWER=42"]).answer() == 42
    assert build.load("answer", ["ANSWER=43"]).answer() == 43
    source.write_text("int answer(void) { return ANSWER + 1; }\n")
    assert build.load("answer", ["ANSWER=42"]).answer() == 43
    assert first.stat().st_mtime_ns == before
    assert len(list(made.iterdir())) == 3
