"""The C kernel of linear layers against float64; and that a row's bits are its own."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from workers.layers.linear import ColumnParallelLinear, PlainWeights, TransposedWeights
from workers.layers.packed import PackedWeights, join_layers
from workers.native import build, linear
from workers.native.calls import load_kernels
from workers.native.linear import LinearKernel, linear_kernel
from workers.parallel import Shard

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        not load_kernels("linear").has_vectors(), reason="the kernel wants AVX-512 or AVX2"
    ),
]

DTYPES = [torch.float32, torch.bfloat16]
# Of the sum of the products' sizes: what is lost on the way, and in rounding the result.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 4e-3}
NAN, INF = float("nan"), float("inf")


def make(dtype: torch.dtype) -> LinearKernel:
    kernel = linear_kernel(dtype)
    assert kernel is not None
    return kernel


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """What is found out about the machine is forgotten, before and after."""
    linear._library.cache_clear()
    yield
    linear._library.cache_clear()


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.sampled_from([1, 2, 3, 5, 6, 12, 13, 40]),
    half_inputs=st.integers(1, 70),
    outputs=st.lists(st.sampled_from([1, 7, 15, 16, 17, 33, 64, 150, 333]), min_size=1, max_size=4),
    has_bias=st.lists(st.booleans(), min_size=4, max_size=4),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
@pytest.mark.usefixtures("threads")
def test_drawn_products_equal_those_in_float64(
    dtype: torch.dtype,
    num_rows: int,
    half_inputs: int,
    outputs: list[int],
    has_bias: list[bool],
    num_threads: int,
    seed: int,
) -> None:
    torch.set_num_threads(num_threads)
    kernel, inputs = make(dtype), 2 * half_inputs
    rows = draw(num_rows, inputs, dtype=dtype, seed=seed)
    weights = [draw(count, inputs, dtype=dtype, seed=seed + count) for count in outputs]
    biases = [
        draw(count, dtype=dtype, seed=count) if has else None
        for count, has in zip(outputs, has_bias, strict=False)
    ]

    found = kernel.joint([kernel.pack(weight) for weight in weights], biases)(rows)

    for product, weight, bias in zip(found, weights, biases, strict=True):
        added = torch.zeros(1).double() if bias is None else bias.double()
        expected = rows.double() @ weight.double().T + added
        scale = rows.double().abs() @ weight.double().abs().T + added.abs()
        assert ((product.double() - expected).abs() <= BOUNDS[dtype] * scale).all()


@pytest.mark.parametrize("outputs", [1, 16, 150])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_rows_and_inputs_may_be_odd(dtype: torch.dtype, outputs: int) -> None:
    """Odd inputs are for float32 alone: bfloat16 multiplies pairs."""
    kernel = make(dtype)
    for inputs in (1, 2, 3, 33):
        if inputs % kernel.inputs_multiple:
            continue
        weight, rows = draw(outputs, inputs, dtype=dtype), draw(7, inputs, dtype=dtype, seed=1)
        (found,) = kernel.joint([kernel.pack(weight)], [None])(rows)
        expected = rows.double() @ weight.double().T
        assert torch.allclose(found.double(), expected, rtol=0.01, atol=0.01 * inputs)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("threads")
def test_a_rows_bits_are_its_own(dtype: torch.dtype, num_threads: int) -> None:
    """Alone, and in tiles of all sizes; in whatever layer stands beside."""
    torch.set_num_threads(num_threads)
    kernel = make(dtype)
    packed = [kernel.pack(draw(count, 98, dtype=dtype, seed=count)) for count in (333, 40)]
    bias = draw(333, dtype=dtype)
    product = kernel.joint(packed, [bias, None])
    rows = draw(40, 98, dtype=dtype, seed=1)
    alone = kernel.joint(packed[:1], [bias])
    expected = torch.cat([alone(row)[0] for row in rows.split(1)])
    for num_rows in range(1, 41):
        assert product(rows[:num_rows])[0].equal(expected[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_damaged_row_damages_no_other(dtype: torch.dtype, value: float) -> None:
    kernel = make(dtype)
    weight = draw(50, 64, dtype=dtype)
    product = kernel.joint([kernel.pack(weight)], [None])
    rows = draw(17, 64, dtype=dtype, seed=1)
    (sound,) = product(rows)
    for place in (0, 9, 63):
        damaged = rows.clone()
        damaged[8, place] = value
        (found,) = product(damaged)
        assert found[:8].equal(sound[:8])
        assert found[9:].equal(sound[9:])
        assert found[8].equal(value * weight[:, place].sign()) or found[8].isnan().all()
        assert found[8].isnan().all() == (value != value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output", [0, 15, 16, 48, 49])
def test_a_damaged_weight_shows_in_its_output_alone(dtype: torch.dtype, output: int) -> None:
    kernel = make(dtype)
    weight = draw(50, 64, dtype=dtype)
    rows = draw(17, 64, dtype=dtype, seed=1)
    (sound,) = kernel.joint([kernel.pack(weight)], [None])(rows)
    weight[output, 5] = NAN
    (found,) = kernel.joint([kernel.pack(weight)], [None])(rows)
    assert found[:, output].isnan().all()
    others = torch.arange(50) != output
    assert found[:, others].equal(sound[:, others])


def test_zeros_beside_infinities_are_no_numbers() -> None:
    """As torch has it; and what fills the last panel stays there."""
    kernel = make(torch.float32)
    weight = torch.zeros(3, 8)
    rows = torch.full((2, 8), INF)
    (found,) = kernel.joint([kernel.pack(weight)], [None])(rows)
    assert found.isnan().all()
    assert found.shape == (2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_weights_and_rows_change_nothing(dtype: torch.dtype) -> None:
    kernel = make(dtype)
    weight = draw(50, 64, dtype=dtype)
    packed = kernel.pack(weight)
    assert kernel.pack(weight.T.contiguous().T).panels.equal(packed.panels)
    wide = draw(50, 200, dtype=dtype)
    wide[:, 100:164] = weight
    assert kernel.pack(wide[:, 100:164]).panels.equal(packed.panels)
    rows = draw(2, 6, 64, dtype=dtype, seed=1)
    product = kernel.joint([packed], [None])
    expected = product(rows)[0]
    assert expected.shape == (2, 6, 50)
    assert product(rows.transpose(0, 1))[0].equal(expected.transpose(0, 1))
    assert product(rows[0, 0])[0].equal(expected[0, 0])
    assert product(rows[:, :0])[0].shape == (2, 0, 50)


@pytest.mark.parametrize("rows", [torch.zeros(4, 32), torch.zeros(4, 64, dtype=torch.bfloat16)])
def test_rows_of_another_width_or_dtype_are_refused(rows: torch.Tensor) -> None:
    """Their addresses would be read from, and written to, beyond their ends."""
    kernel = make(torch.float32)
    product = kernel.joint([kernel.pack(draw(8, 64))], [None])
    with pytest.raises(RuntimeError, match=r"for weights of 64 inputs in torch\.float32"):
        product(rows)


def test_what_cannot_be_joined_is_refused() -> None:
    kernel = make(torch.bfloat16)
    one, other = (kernel.pack(draw(8, n, dtype=torch.bfloat16)) for n in (64, 32))
    with pytest.raises(ValueError, match=r"\[64, 32\] inputs"):
        kernel.joint([one, other], [None, None])
    with pytest.raises(ValueError, match="not joined"):
        kernel.joint([one] * 5, [None] * 5)
    for bias in (torch.zeros(8), torch.zeros(7, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="bias"):
            kernel.joint([one], [bias])


def layer_of(
    source: nn.Module, kernel: LinearKernel, base: PlainWeights | TransposedWeights
) -> ColumnParallelLinear:
    outputs = source.bias.shape[0]
    shard = Shard(dim=0, ranges=((0, outputs),), size=outputs)
    layer = ColumnParallelLinear(source, shard, PackedWeights(base, kernel))
    layer.load_state_dict(source.state_dict())
    return layer


class Transposed(nn.Module):
    """As GPT-2 stores its layers."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.T.contiguous())
        self.bias = nn.Parameter(bias)


@torch.inference_mode()
def test_layers_of_both_kinds_are_packed() -> None:
    kernel, source = make(torch.float32), nn.Linear(64, 50)
    stored = Transposed(source.weight, source.bias)
    rows = draw(5, 64)
    expected = source(rows)
    outputs = []
    for each, base in ((source, PlainWeights()), (stored, TransposedWeights())):
        layer = layer_of(each, kernel, base)
        assert torch.allclose(layer(rows), expected, atol=1e-5), "not packed yet"
        layer.method.finish(layer)
        assert layer.method.packed is not None
        outputs.append(layer(rows))
    assert torch.allclose(outputs[0], expected, atol=1e-5)
    assert outputs[0].equal(outputs[1])


@torch.inference_mode()
def test_what_the_kernel_does_not_take_stays_as_it_is() -> None:
    kernel = make(torch.bfloat16)
    for inputs, weight_dtype, bias_dtype in (
        (63, torch.bfloat16, torch.bfloat16),
        (64, torch.float32, torch.float32),
        (64, torch.bfloat16, torch.float32),
    ):
        layer = layer_of(nn.Linear(inputs, 8), kernel, PlainWeights())
        layer.weight.data, layer.bias.data = (
            layer.weight.to(weight_dtype),
            layer.bias.to(bias_dtype),
        )
        layer.method.finish(layer)
        assert layer.method.packed is None
        assert layer.weight.shape == (8, inputs)
        assert join_layers([layer]) is None


@torch.inference_mode()
def test_layers_of_other_inputs_are_not_joined() -> None:
    kernel = make(torch.float32)
    layers = [layer_of(nn.Linear(n, 8), kernel, PlainWeights()) for n in (64, 64, 32)]
    for layer in layers:
        layer.method.finish(layer)
    assert join_layers(layers[:2]) is not None
    assert join_layers(layers) is None


@pytest.mark.usefixtures("fresh_library")
def test_without_a_compiler_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert linear_kernel(torch.float32) is None
    assert "linear layers are multiplied by torch: there is no C compiler" in caplog.text


@pytest.mark.usefixtures("fresh_library")
def test_a_compiler_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert linear_kernel(torch.float32) is None
    assert "linear layers are multiplied by torch: " in caplog.text


@pytest.mark.usefixtures("fresh_library")
def test_narrow_vectors_leave_it_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    narrow = tuple(flag.replace("native", "x86-64") for flag in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", narrow)
    assert linear_kernel(torch.float32) is None
    assert "no AVX-512, and no AVX2 with FMA" in caplog.text


@pytest.mark.usefixtures("fresh_library")
def test_a_kernel_that_computes_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    """As of a compiler with a fault: what is compiled has it."""
    right, wrong = (
        "first_row(j, s + 1) - row, begin",
        "first_row(j, s + 1) - row - (s > 0), begin",
    )
    source = (build.FOLDER / "linear.c").read_text()
    assert right in source
    (tmp_path / "linear.c").write_text(source.replace(right, wrong))
    for name in ("threads.c", "threads.h", "vectors.h", "waiting.h"):
        (tmp_path / name).write_text((build.FOLDER / name).read_text())
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "FLAGS", tuple(f.replace("-O3", "-O1") for f in build.FLAGS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert linear_kernel(torch.float32) is None
    assert "the kernel is wrong on this machine" in caplog.text


def test_other_numbers_have_no_kernel() -> None:
    assert linear_kernel(torch.float16) is None
