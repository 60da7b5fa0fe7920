"""Products of rows with packed weights, by a kernel of ours in C, on a CPU."""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from workers.native.build import NoCompilerError
from workers.native.calls import Call, address_of, load_kernels

logger = logging.getLogger(__name__)

PANEL = 16
MAX_PARTS = 4
ALIGNMENT = 64  # bytes
DEFINITIONS: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: (),
    torch.bfloat16: ("BFLOAT16",),
}


class _Part(ctypes.Structure):
    """As in linear.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
    )


class _Arguments(ctypes.Structure):
    """As in linear.c."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("stage", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_parts", "num_threads")),
        ("parts", _Part * MAX_PARTS),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One linear layer's. `panels` [P, in / group, 16 * group] are in the kernel's order."""

    panels: torch.Tensor
    inputs: int
    outputs: int


class LinearKernel:
    """For weights and rows of one dtype. Threads are those of torch.

    A row's outputs have the same bits whatever rows and layers are beside it.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        for size in (library.arguments_bytes, library.stage_bytes, library.inputs_multiple):
            size.restype = ctypes.c_int64
        library.stage_bytes.argtypes = [ctypes.c_int64, ctypes.c_int64]
        library.pack.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_int64,) * 4,
            ctypes.c_int32,
        ]
        library.pack.restype = library.linear.restype = None
        assert library.arguments_bytes() == ctypes.sizeof(_Arguments), "as in linear.c"
        self.dtype = dtype
        self.inputs_multiple: int = library.inputs_multiple()
        self.run = library.linear
        self.run.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.address = address_of(library.linear)
        self._pack = library.pack
        self._stage_bytes = library.stage_bytes
        self._stage = torch.empty(0, dtype=torch.uint8)
        self._stage_address = 0

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """A copy of a weight [out, in], whose `in` is a multiple of inputs_multiple."""
        outputs, inputs = weight.shape
        assert weight.dtype == self.dtype
        assert inputs % self.inputs_multiple == 0
        shape = (-(-outputs // PANEL), inputs // self.inputs_multiple, PANEL * self.inputs_multiple)
        panels = empty_aligned(shape, self.dtype)
        self._pack(
            *(panels.data_ptr(), weight.data_ptr()),
            *(outputs, inputs, *weight.stride()),
            torch.get_num_threads(),
        )
        return PackedWeight(panels, inputs, outputs)

    def joint(
        self, weights: Sequence[PackedWeight], biases: Sequence[torch.Tensor | None]
    ) -> "JointProduct":
        """Up to 4 layers of as many inputs, that get the same rows; biases [out] of the same dtype.

        Raises ValueError: they aren't that.
        """
        return JointProduct(self, weights, biases)

    def row_bytes(self, inputs: int) -> int:
        """Of room for a row as the kernel takes it."""
        count: int = self._stage_bytes(1, inputs)
        return count

    def room(self, num_rows: int, inputs: int) -> int:
        """Address of room for rows as the kernel takes them; it stays for the next call."""
        wanted = num_rows * self.row_bytes(inputs)
        if self._stage.numel() < wanted:
            self._stage = empty_aligned((wanted,), torch.uint8)
            self._stage_address = self._stage.data_ptr()
        return self._stage_address


class JointProduct:
    """Layers that get the same rows, multiplied in one go.

    What a call doesn't change is written down for the kernel once.
    """

    def __init__(
        self,
        kernel: LinearKernel,
        weights: Sequence[PackedWeight],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        if len(weights) > MAX_PARTS or len({weight.inputs for weight in weights}) != 1:
            raise ValueError(
                f"layers of {[weight.inputs for weight in weights]} inputs: not joined"
            )
        for weight, bias in zip(weights, biases, strict=True):
            if bias is not None and not _is_vector(bias, weight.outputs, kernel.dtype):
                raise ValueError(
                    f"bias {list(bias.shape)} {bias.dtype} of {weight.outputs} outputs"
                )
        self._kernel = kernel
        self.dtype = kernel.dtype
        self._held = [*weights], [*biases]  # the kernel has their addresses
        self.row_bytes = kernel.row_bytes(weights[0].inputs)
        self.inputs = weights[0].inputs
        self.outputs = [each.outputs for each in weights]
        self._arguments = _Arguments(inputs=self.inputs, num_parts=len(weights))
        self._parts = [self._arguments.parts[place] for place in range(len(weights))]
        for part, weight, bias in zip(self._parts, weights, biases, strict=True):
            part.weight = weight.panels.data_ptr()
            part.bias = None if bias is None else bias.data_ptr()
            part.outputs = weight.outputs
        self._reference = ctypes.byref(self._arguments)

    def __call__(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """[..., in] -> [..., out] of each layer.

        Raises RuntimeError, as torch does: rows of another width or dtype.
        """
        if rows.shape[-1] != self.inputs or rows.dtype != self.dtype:
            raise RuntimeError(
                f"rows {list(rows.shape)} {rows.dtype} for weights of {self.inputs} inputs in "
                f"{self.dtype}"
            )
        rows = rows.contiguous()
        shape = rows.shape[:-1]
        num_rows = rows.numel() // self.inputs
        outputs = [rows.new_empty((*shape, count)) for count in self.outputs]
        if num_rows == 0:
            return outputs
        for part, output in zip(self._parts, outputs, strict=True):
            part.output = output.data_ptr()
        arguments = self._arguments
        arguments.rows = rows.data_ptr()
        arguments.stage = self._kernel.room(num_rows, self.inputs)
        arguments.num_threads = torch.get_num_threads()
        self._kernel.run(self._reference, num_rows)
        return outputs

    def call(self, rows: int, outputs: Sequence[int], stage: int) -> Call:
        """Of what lies at these addresses, dense; `stage` is room of row_bytes for each row."""
        arguments = _Arguments.from_buffer_copy(self._arguments)
        arguments.rows, arguments.stage = rows, stage
        arguments.num_threads = torch.get_num_threads()
        for place, output in enumerate(outputs):
            arguments.parts[place].output = output
        return Call(self._kernel.address, arguments)


def _is_vector(tensor: torch.Tensor, length: int, dtype: torch.dtype) -> bool:
    return tensor.shape == (length,) and tensor.dtype == dtype and tensor.is_contiguous()


def empty_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Beginning at a multiple of what the widest vectors have."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size].view(dtype).view(shape)


def linear_kernel(dtype: torch.dtype) -> LinearKernel | None:
    """One of its own for each thread that multiplies: it has room that it computes in.

    None where there is none for these numbers, this processor or without a compiler; the reason is
    logged.
    """
    library = _library(dtype)
    return None if library is None else LinearKernel(library, dtype)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in DEFINITIONS:
        return None
    try:
        library = load_kernels("linear", DEFINITIONS[dtype])
    except NoCompilerError as error:
        logger.warning("linear layers are multiplied by torch: %s", error)
        return None
    if not library.has_vectors():
        logger.info("linear layers are multiplied by torch: no AVX-512, and no AVX2 with FMA")
        return None
    if not _is_right(LinearKernel(library, dtype)):
        logger.warning("linear layers are multiplied by torch: the kernel is wrong on this machine")
        return None
    return library


def _is_right(kernel: LinearKernel) -> bool:
    """Whether small whole numbers are multiplied exactly, in tiles of all sizes."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(kernel.dtype)

    weight, bias = whole(150, 64), whole(150)
    product = kernel.joint([kernel.pack(weight)], [bias])
    for num_rows in range(1, 30):
        rows = whole(num_rows, 64)
        (found,) = product(rows)
        if not found.float().equal(rows.float() @ weight.float().T + bias.float()):
            return False
    return True
