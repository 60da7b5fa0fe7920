"""How fast a device runs steps of real shapes, beside what it could do at best."""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.gpu import shapes
from tests.gpu.clock import release, seconds
from workers.batch import Batch
from workers.model_executor import ModelExecutor
from workers.models.config import DTYPES

REPEATS = 20
GENERATED = 32  # tokens of each row, by transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """`floor_ms` is the least that the device's bandwidth or matrix rate allows."""

    what: str
    milliseconds: float
    floor_ms: float | None
    tokens_per_s: float
    host_us: float | None = None  # until the step is launched
    ratio: float | None = None  # of tokens a second to transformers' generate

    @property
    def over_floor(self) -> float | None:
        return None if self.floor_ms is None else self.milliseconds / self.floor_ms

    def facts(self) -> dict[str, object]:
        return asdict(self) | {"over_floor": self.over_floor}


def time_shape(
    shape: shapes.Shape, device: torch.device, *, bytes_per_s: float, flops_per_s: float
) -> Iterator[Timing]:
    """Decode steps, a prefill step, and transformers' `generate` on as many rows."""
    with tempfile.TemporaryDirectory() as folder:
        executor = shapes.load(shape, Path(folder), device)
    decoded: dict[int, float] = {}
    for rows in shape.rows:
        batch = shapes.make_step(executor, seq_lens=[shape.context] * rows, query_lens=[1] * rows)
        timing = _time_step(executor, batch, device, f"{shape.name} decode {rows} rows")
        floor = 1e3 * _decode_bytes(executor, shape, rows) / bytes_per_s
        decoded[rows] = timing.tokens_per_s
        yield _with_floor(timing, floor)
    batch = shapes.make_step(executor, seq_lens=[0], query_lens=[shape.prefill])
    timing = _time_step(executor, batch, device, f"{shape.name} prefill {shape.prefill} tokens")
    floor = 1e3 * _prefill_flops(executor, shape) / flops_per_s
    yield _with_floor(timing, floor)
    del executor
    release(device)
    yield _time_generate(shape, device, decoded)
    release(device)


def _time_step(executor: ModelExecutor, batch: Batch, device: torch.device, what: str) -> Timing:
    host_us: list[int] = []

    def run() -> None:
        executor.forward(batch)
        host_us.append(executor.timings.forward_us)
        sampled = executor.sample()
        assert sampled is not None
        sampled()

    took = seconds(run, device, repeats=REPEATS)
    return Timing(
        what=what,
        milliseconds=1e3 * took,
        floor_ms=None,
        tokens_per_s=len(batch.input_ids) / took,
        host_us=sorted(host_us)[len(host_us) // 2],
    )


def _with_floor(timing: Timing, floor_ms: float) -> Timing:
    return Timing(
        what=timing.what,
        milliseconds=timing.milliseconds,
        floor_ms=floor_ms,
        tokens_per_s=timing.tokens_per_s,
        host_us=timing.host_us,
    )


def _decode_bytes(executor: ModelExecutor, shape: shapes.Shape, rows: int) -> int:
    """Weights once, but for an embedding of its own, of which few rows are read; K and V once."""
    weights = executor.spec.parameter_bytes
    if not shape.config.tie_word_embeddings:
        element_bytes = executor.spec.layers[0].element_bytes
        weights -= shape.config.vocab_size * shape.config.hidden_size * element_bytes
    return weights + rows * shape.context * _token_bytes(executor)


def _token_bytes(executor: ModelExecutor) -> int:
    return sum(
        layer.num_kv_heads * (layer.k_dim + layer.v_dim) * layer.element_bytes
        for layer in executor.spec.layers
    )


def _prefill_flops(executor: ModelExecutor, shape: shapes.Shape) -> float:
    """Two for each weight of a layer and token, and attention's half square; one row of logits."""
    element_bytes = executor.spec.layers[0].element_bytes
    tables = 1 if shape.config.tie_word_embeddings else 2
    outside = tables * shape.config.vocab_size * shape.config.hidden_size
    weights = executor.spec.parameter_bytes // element_bytes - outside
    attention = sum(
        shape.config.num_attention_heads * (layer.k_dim + layer.v_dim)
        for layer in executor.spec.layers
    )
    return 2 * weights * shape.prefill + attention * shape.prefill**2


def _time_generate(shape: shapes.Shape, device: torch.device, decoded: dict[int, float]) -> Timing:
    """Of the largest batch up to 64 rows, as our decode step: without its prefill.

    transformers' own attention and cache, one prompt of the same length in each row.
    """
    rows = max(each for each in shape.rows if each <= 64)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=DTYPES[shape.dtype]).eval()
    prompt = torch.randint(shape.config.vocab_size, (rows, shape.context), device=device)
    took = {}
    with torch.inference_mode():
        for count in (1, 1 + GENERATED):
            took[count] = seconds(
                lambda count=count: model.generate(
                    prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False
                ),
                device,
                repeats=1,
                warm=1,
            )
    step = (took[1 + GENERATED] - took[1]) / GENERATED
    rate = rows / step
    return Timing(
        what=f"{shape.name} transformers generate {rows} rows",
        milliseconds=1e3 * step,
        floor_ms=None,
        tokens_per_s=rate,
        ratio=decoded[rows] / rate,
    )
