"""What this machine does at best: matrix products and reading memory, by torch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Rows, inner size, outputs: large ones for the peak, then what models of the workloads have.
PEAK_SHAPES = ((512, 2048, 2048), (1024, 2048, 2048))
MODEL_SHAPES = ((1, 768, 2048), (8, 768, 2048), (32, 768, 2048), (512, 768, 2048), (32, 768, 32000))
READ_VALUES = 1 << 28  # float32: far more than caches hold
MIN_S = 0.5  # that a product is repeated for


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured, with torch's own number of threads."""

    # By dtype and shape (rows, inner size, outputs).
    flops_per_s: Mapping[tuple[str, tuple[int, int, int]], float]
    bytes_per_s: float

    @property
    def best(self) -> tuple[str, float]:
        """The dtype and the rate of the fastest product.

        An engine may compute in another dtype than weights have: the floor is by the faster.
        """
        (dtype, _), rate = max(self.flops_per_s.items(), key=lambda each: each[1])
        return dtype, rate


def measure_rates() -> Rates:
    found = {
        (name, shape): _product_rate(dtype, shape)
        for name, dtype in DTYPES.items()
        for shape in (*PEAK_SHAPES, *MODEL_SHAPES)
    }
    values = torch.ones(READ_VALUES)
    return Rates(
        flops_per_s=found,
        bytes_per_s=values.nbytes / _best_s(lambda: values.sum()),
    )


def _product_rate(dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    rows, inner, outputs = shape
    inputs = torch.randn(rows, inner).to(dtype)
    weights = torch.randn(outputs, inner).to(dtype)
    seconds = _best_s(lambda: torch.nn.functional.linear(inputs, weights))
    return 2 * rows * inner * outputs / seconds


def _best_s(run: Callable[[], object]) -> float:
    """The shortest of many: what disturbs a run makes it longer, never shorter."""
    run()
    best_s = float("inf")
    end_s = time.perf_counter() + MIN_S
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
