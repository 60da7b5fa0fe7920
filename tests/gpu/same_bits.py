"""Whether a row's bits are its own in deterministic mode: of linear layers, and of a model."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.gpu import shapes
from tests.gpu.correctness import BOUNDS, Verdict
from workers.errors import ModelError
from workers.layers.fp8 import find_scale, quantise
from workers.layers.linear_methods import choose_methods

SIZES = ((2048, 3072), (300, 77))  # inputs, outputs
NUM_ROWS = 200
PARTS = ((0, 1), (1, 2), (17, 81), (63, 65), (130, 200))
PROMPT_LENGTHS = (50, 3, 70)


def check_products(device: torch.device) -> Iterator[Verdict]:
    """Plain weights and those of 8 bits, against float64, and each row among others."""
    generator = torch.Generator().manual_seed(1)
    for dtype, bound in BOUNDS.items():
        methods = choose_methods(device, dtype, deterministic=True, quantization="fp8")
        assert methods.fp8 is not None, "it was asked for"
        for num_inputs, num_outputs in SIZES:
            rows = torch.randn(NUM_ROWS, num_inputs, generator=generator).to(device, dtype)
            weight = torch.randn(num_outputs, num_inputs, generator=generator).to(device, dtype)
            bias = torch.randn(num_outputs, generator=generator).to(device, dtype)
            scale = find_scale(weight.float())
            small = quantise(weight.float(), scale)
            widened = small.double() * scale.double()[:, None]
            for name, used, outputs, parts in (
                (
                    "plain",
                    weight.double(),
                    methods.product(rows, weight, bias),
                    [methods.product(rows[slice(*part)], weight, bias) for part in PARTS],
                ),
                (
                    "fp8",
                    widened,
                    methods.fp8(rows, small, scale, bias),
                    [methods.fp8(rows[slice(*part)], small, scale, bias) for part in PARTS],
                ),
            ):
                what = f"{name} product {str(dtype).removeprefix('torch.')}"
                wanted = rows.double() @ used.T + bias.double()
                error = float((outputs.double() - wanted).abs().max() / wanted.abs().max())
                fault = "" if error <= bound else f"off by {error:.2e} of the largest value"
                for part, own in zip(PARTS, parts, strict=True):
                    if not torch.equal(own, outputs[slice(*part)]):
                        fault = fault or f"rows {part} have other bits among others"
                yield Verdict(f"{what} {num_inputs}x{num_outputs}", fault)


def check_deterministic(device: torch.device, shape: shapes.Shape) -> Verdict:
    """A prompt's logits alone, beside other prompts, and where its last token comes by itself."""
    what = f"deterministic: {shape.name} has the same bits in any batch"
    lengths = list(PROMPT_LENGTHS)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 100, (sum(lengths),), generator=generator)
    own = tokens[: lengths[0]]
    try:
        with tempfile.TemporaryDirectory() as folder:
            executor = shapes.load(shape, Path(folder), device, deterministic=True)
        shapes.allocate(executor, len(lengths) * -(-max(lengths) // 16))
    except ModelError as error:
        return Verdict(what, str(error))

    def logits(seq_lens: list[int], query_lens: list[int], fed: torch.Tensor) -> torch.Tensor:
        step = shapes.make_step(
            executor, seq_lens=seq_lens, query_lens=query_lens, tokens=fed, reach=max(lengths)
        )
        found = executor.compute_logits(step)
        assert found is not None
        return found[0].cpu()

    alone = logits([0], lengths[:1], own)
    if not torch.equal(logits([0] * len(lengths), lengths, tokens), alone):
        return Verdict(what, "beside other prompts it has other bits")
    other = tokens[lengths[0] :]
    logits([0, 0], [lengths[0] - 1, 4], torch.cat((own[:-1], other[:4])))
    by_itself = logits([lengths[0] - 1, 4], [1, 1], torch.cat((own[-1:], other[4:5])))
    return Verdict(what, "" if torch.equal(by_itself, alone) else "in decode it has other bits")
