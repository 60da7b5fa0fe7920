"""The C kernels of norms, rotary embedding and gates against torch; a row's bits are its own.

Torch computes as transformers' code does, rounding where it rounds.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.nn import functional

from workers.native.calls import Call, Calls, load_kernels
from workers.native.decoder import Gate, Norm, decoder_kernels

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        not load_kernels("decoder").has_vectors(), reason="the kernels want AVX-512 or AVX2"
    ),
]

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # a last bit or two of each number
WIDTHS = [16, 48, 64, 640]
EPSILON = 1e-5
MANY = 300  # rows: of a width of 64 so many are worth threads

every_dtype = pytest.mark.parametrize("dtype", [*BOUNDS])
GATES: dict[Gate, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": lambda gate: functional.gelu(gate, approximate="tanh"),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Kernels:
    """One call at a time, of dense tensors [1, T, width]."""

    def __init__(self, dtype: torch.dtype) -> None:
        kernels = decoder_kernels(dtype)
        assert kernels is not None
        self._kernels = kernels

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        output = torch.empty_like(rows)
        width = rows.shape[-1]
        self._run(self._kernels.norm(output.data_ptr(), rows.data_ptr(), norm, width=width), rows)
        return output

    def add(self, rows: torch.Tensor, added: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        output = torch.empty_like(rows)
        addresses = output.data_ptr(), rows.data_ptr()
        width = rows.shape[-1]
        call = self._kernels.norm(*addresses, norm, width=width, added=added.data_ptr())
        self._run(call, rows)
        return output

    def norm_and_rotate(
        self,
        heads: Sequence[torch.Tensor],
        norms: Sequence[Norm | None],
        cosine: torch.Tensor,
        sine: torch.Tensor,
        *,
        dim: int,
    ) -> None:
        places = [(each.data_ptr(), each.shape[-1] // dim) for each in heads]
        call = self._kernels.norm_and_rotate(places, norms, dim=dim)
        arguments = call.arguments
        arguments.cosine, arguments.sine = cosine.data_ptr(), sine.data_ptr()
        arguments.rotary = cosine.shape[-1]
        self._run(call, cosine)

    def gate(self, kind: Gate, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(up)
        addresses = output.data_ptr(), gate.data_ptr(), up.data_ptr()
        self._run(self._kernels.gate(kind, *addresses, width=up.shape[-1]), up)
        return output

    def _run(self, call: Call, rows: torch.Tensor) -> None:
        Calls([call])(rows.shape[1])


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = BOUNDS[expected.dtype]
    assert found.dtype == expected.dtype
    assert torch.allclose(found.double(), expected.double(), rtol=bound, atol=bound)


def normed(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    """As LlamaRMSNorm, or as Gemma3RMSNorm."""
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)
    if norm.plus_one:
        return (wide * (1.0 + norm.weight.float())).to(rows.dtype)
    return norm.weight * wide.to(rows.dtype)


def norm_of(width: int, dtype: torch.dtype, *, plus_one: bool, seed: int = 7) -> Norm:
    return Norm(draw(width, dtype=dtype, seed=seed), EPSILON, plus_one)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@every_dtype
def test_norms(dtype: torch.dtype, width: int, plus_one: bool) -> None:
    kernels, norm = Kernels(dtype), norm_of(width, dtype, plus_one=plus_one)
    for scale in (1.0, EPSILON**0.5):  # so small that epsilon counts
        rows = draw(1, 7, width, dtype=dtype) * scale
        check(kernels.norm(rows, norm), normed(rows, norm))


@pytest.mark.parametrize("plus_one", [None, False, True])
@pytest.mark.parametrize("width", WIDTHS)
@every_dtype
def test_sums(dtype: torch.dtype, width: int, plus_one: bool | None) -> None:
    """Of rows and what is added, itself or its norm."""
    kernels = Kernels(dtype)
    rows, added = draw(1, 7, width, dtype=dtype), draw(1, 7, width, dtype=dtype, seed=1)
    given = rows.clone(), added.clone()
    norm = None if plus_one is None else norm_of(width, dtype, plus_one=plus_one)
    expected = rows + (added if norm is None else normed(added, norm))
    check(kernels.add(rows, added, norm), expected)
    assert rows.equal(given[0])
    assert added.equal(given[1])


def rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """[1, T, heads, dim], as transformers turns the first of each head's numbers."""
    rotary = cosine.shape[-1]
    turned, rest = heads[..., :rotary], heads[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    halves = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cosine[:, :, None] + halves * sine[:, :, None], rest), dim=-1)


@pytest.mark.parametrize("norms", ["none", "plain", "plus one"])
@pytest.mark.parametrize(("dim", "rotary"), [(32, 32), (64, 64), (64, 32), (80, 64), (128, 96)])
@pytest.mark.parametrize("num_rows", [1, 5, MANY])
@every_dtype
def test_heads_are_normed_and_turned(
    dtype: torch.dtype, num_rows: int, dim: int, rotary: int, norms: str
) -> None:
    kernels = Kernels(dtype)
    parts = [draw(1, num_rows, heads * dim, dtype=dtype, seed=heads) for heads in (4, 1)]
    cosine, sine = (draw(1, num_rows, rotary, dtype=dtype, seed=seed) for seed in (8, 9))
    of_heads: list[Norm | None] = [None, None]
    if norms != "none":
        of_heads = [norm_of(dim, dtype, plus_one=norms == "plus one", seed=seed) for seed in (3, 4)]
    expected = []
    for part, norm in zip(parts, of_heads, strict=True):
        heads = part.view(1, num_rows, -1, dim)
        heads = heads if norm is None else normed(heads, norm)
        expected.append(rotated(heads, cosine, sine).flatten(2))

    kernels.norm_and_rotate(parts, of_heads, cosine, sine, dim=dim)

    for part, wanted in zip(parts, expected, strict=True):
        # Two products of normed numbers are added.
        bound = 4 * BOUNDS[dtype]
        assert torch.allclose(part.double(), wanted.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", [*GATES])
@pytest.mark.parametrize("num_rows", [1, 7, MANY])
@every_dtype
def test_gates(dtype: torch.dtype, num_rows: int, kind: Gate) -> None:
    """Also where gates are shut, or as wide open as can be."""
    gate = 4 * draw(1, num_rows, 96, dtype=dtype)
    special = torch.tensor([0.0, -0.0, 30.0, -30.0, 90.0, -90.0, 1e30, -1e30, float("inf")])
    gate[0, 0, : len(special)] = special.to(dtype)
    up = draw(1, num_rows, 96, dtype=dtype, seed=1)
    check(Kernels(dtype).gate(kind, gate, up), GATES[kind](gate) * up)


@pytest.mark.parametrize("kind", [*GATES])
@every_dtype
def test_gates_tell_of_what_is_no_number(dtype: torch.dtype, kind: Gate) -> None:
    gate, up = draw(1, 3, 96, dtype=dtype), draw(1, 3, 96, dtype=dtype, seed=1)
    sound = Kernels(dtype).gate(kind, gate, up)
    gate[0, 1, 5] = up[0, 2, 7] = float("nan")
    is_damaged = Kernels(dtype).gate(kind, gate, up).isnan()
    assert is_damaged.nonzero().tolist() == [[0, 1, 5], [0, 2, 7]]
    assert Kernels(dtype).gate(kind, gate, up)[~is_damaged].equal(sound[~is_damaged])


@every_dtype
def test_a_damaged_row_damages_no_other(dtype: torch.dtype) -> None:
    kernels, norm = Kernels(dtype), norm_of(64, dtype, plus_one=False)
    rows = draw(1, MANY, 64, dtype=dtype)
    sound = kernels.norm(rows, norm)
    rows[0, 17, 40] = float("nan")
    found = kernels.norm(rows, norm)
    others = torch.arange(MANY) != 17
    assert found[0, 17].isnan().all()
    assert found[0, others].equal(sound[0, others])


@every_dtype
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    """Alone, by one thread, and among so many that threads share them."""
    kernels, norm = Kernels(dtype), norm_of(64, dtype, plus_one=True)
    plain = norm_of(64, dtype, plus_one=False)
    rows, added = draw(1, MANY, 64, dtype=dtype), draw(1, MANY, 64, dtype=dtype, seed=1)
    turns = [draw(1, MANY, 64, dtype=dtype, seed=seed) for seed in (2, 3)]

    def turned(rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        heads = [rows.clone(), rows.clone()]
        kernels.norm_and_rotate(heads, [norm, norm], cosine, sine, dim=64)
        return torch.cat(heads, dim=-1)

    functions: list[tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = [
        (lambda each: kernels.norm(each, plain), [rows]),
        (lambda each, other: kernels.add(each, other, None), [rows, added]),
        (lambda each, other: kernels.add(each, other, norm), [rows, added]),
        (lambda each, other: kernels.gate("silu", each, other), [rows, added]),
        (lambda each, other: kernels.gate("gelu", each, other), [rows, added]),
        (turned, [rows, *turns]),
    ]
    for function, inputs in functions:
        together = function(*inputs)
        alone = [function(*row) for row in zip(*(each.split(1, 1) for each in inputs), strict=True)]
        assert together.equal(torch.cat(alone, dim=1))


@every_dtype
def test_no_rows_are_no_end(dtype: torch.dtype) -> None:
    kernels, norm = Kernels(dtype), norm_of(64, dtype, plus_one=False)
    rows = torch.empty(1, 0, 64, dtype=dtype)
    assert kernels.norm(rows, norm).shape == rows.shape
    assert kernels.add(rows, rows, norm).shape == rows.shape
    assert kernels.gate("silu", rows, rows).shape == rows.shape
    kernels.norm_and_rotate([rows, rows], [norm, norm], rows, rows, dim=64)


def test_without_a_compiler_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    decoder_kernels.cache_clear()
    try:
        assert decoder_kernels(torch.float32) is None
    finally:
        decoder_kernels.cache_clear()
    assert "decoder layers are computed by torch: there is no C compiler" in caplog.text
    assert decoder_kernels(torch.float16) is None
