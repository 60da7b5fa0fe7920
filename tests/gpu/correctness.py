"""Whether a device computes what it should: backends, graphs, and the embedded model's tokens."""

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.gpu import shapes
from tests.gpu.clock import release
from tests.plain_attention import plain_attention
from workers.attention.base import AttentionBackend, AttentionShape, UnsuitedError, build_inputs
from workers.attention.choice import BACKENDS
from workers.batch import Batch
from workers.config import CacheLayout, LayerCacheSpec
from workers.kv_cache import allocate
from workers.staging import Staging

BLOCK_SIZES = (16, 256)
# Of the largest value, by dtype; float32 may be computed in TF32 by libraries.
BOUNDS = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PROMPT = [2, 818, 5279, 529, 7001, 563]
NUM_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was looked at; `fault` says what is wrong with it, "" nothing, None: it wasn't run."""

    what: str
    fault: str | None
    note: str = ""


def check_backends(device: torch.device, *, quick: bool) -> Iterator[Verdict]:
    """Each against the formula in float64, over batches of prompts, chunks and single tokens."""
    dtypes = (torch.float32,) if device.type == "cpu" else tuple(BOUNDS)
    for name, make in BACKENDS.items():
        for dtype in dtypes:
            for index, shape in enumerate(_attention_shapes()[: 3 if quick else None]):
                what = f"{name} {str(dtype).removeprefix('torch.')} {_describe(shape)}"
                try:
                    backend = make([shape], dtype, device)
                except UnsuitedError as error:
                    yield Verdict(what, None, str(error))
                    continue
                compare = partial(_compare, backend, shape, dtype, device, seed=index)
                yield attempt(what, lambda what=what, run=compare: Verdict(what, run()))


def attempt(what: str, check: Callable[[], Verdict]) -> Verdict:
    """What fails in whatever way is wrong, and ends no other check."""
    try:
        return check()
    except Exception as error:
        return Verdict(what, f"{type(error).__name__}: {str(error)[:300]}")


def _attention_shapes() -> list[AttentionShape]:
    def shape(heads: int, kv_heads: int, dim: int, **others: object) -> AttentionShape:
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "k_dim": dim, "v_dim": dim}
        return AttentionShape(**sizes | {"scale": dim**-0.5} | others)  # type: ignore[arg-type]

    return [
        shape(16, 8, 128),
        shape(32, 8, 128, window=100),
        shape(4, 1, 256, softcap=30.0),
        shape(8, 8, 64),
        shape(64, 8, 64, window=128, has_sinks=True),
        shape(8, 2, 96, chunk=64),
        shape(16, 16, 192, v_dim=128),
    ]


def _describe(shape: AttentionShape) -> str:
    parts = [f"{shape.num_heads}/{shape.num_kv_heads}x{shape.k_dim}"]
    parts += [f"v{shape.v_dim}"] if shape.v_dim != shape.k_dim else []
    for name in ("window", "chunk", "softcap"):
        parts += [f"{name} {getattr(shape, name):g}"] if getattr(shape, name) else []
    return " ".join([*parts, *(["sinks"] if shape.has_sinks else [])])


def _compare(
    backend: AttentionBackend,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int,
) -> str:
    """Sequences come in four steps, by pieces of any length, empty tables never."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    block_size = next(size for size in BLOCK_SIZES if size % backend.block_size_multiple == 0)
    # The last step is single tokens alone.
    ends = [
        [1, 2, 3, 4],
        [300, 301, 302, 303],
        [0, 257, 600, 601],
        [16, 32, 48, 49],
        [5, 6, 700, 701],
    ]
    width = -(-max(each[-1] for each in ends) // block_size)
    layer = LayerCacheSpec(
        window=shape.window,
        chunk=shape.chunk,
        num_kv_heads=shape.num_kv_heads,
        k_dim=shape.k_dim,
        v_dim=shape.v_dim,
        element_bytes=dtype.itemsize,
    )
    layout = CacheLayout(block_size=block_size, num_blocks=width * len(ends), groups=((0, 1),))
    caches, _ = allocate(
        [layer, layer], layout, dtype=dtype, device=device, available_bytes=1 << 40
    )
    caches[1].pool.fill_(7)
    order = draw.sample(range(layout.num_blocks), layout.num_blocks)
    tables = [order[i * width : (i + 1) * width] for i in range(len(ends))]
    heads = (
        (shape.num_heads, shape.k_dim),
        (shape.num_kv_heads, shape.k_dim),
        (shape.num_kv_heads, shape.v_dim),
    )
    texts = [
        [torch.randn(each[-1], *size, generator=generator).to(dtype) for size in heads]
        for each in ends
    ]
    sinks = torch.randn(shape.num_heads, generator=generator) if shape.has_sinks else None
    settings = {
        "scale": shape.scale,
        "window": shape.window,
        "chunk": shape.chunk,
        "softcap": shape.softcap,
    }
    found: list[list[torch.Tensor]] = [[] for _ in ends]
    for step in range(4):
        pieces = [(i, each[step - 1] if step else 0, each[step]) for i, each in enumerate(ends)]
        pieces = [piece for piece in pieces if piece[1] < piece[2]]
        batch = _batch(pieces, tables)
        (metadata,) = build_inputs(batch, block_size=block_size, staging=Staging(device)).groups
        parts = [
            torch.cat([texts[i][kind][start:end] for i, start, end in pieces]).to(device)
            for kind in range(3)
        ]
        output = backend.attend(
            *parts,
            caches[1],
            metadata,
            **settings,
            sinks=None if sinks is None else sinks.to(device),
        )
        lengths = [end - start for _, start, end in pieces]
        for (i, *_), piece in zip(pieces, output.cpu().split(lengths), strict=True):
            found[i].append(piece)
    worst = 0.0
    for text, outputs in zip(texts, found, strict=True):
        doubled = [part.double() for part in text]
        expected = plain_attention(
            *doubled, **settings, sinks=None if sinks is None else sinks.double()
        )
        error = (torch.cat(outputs).double() - expected).abs().max()
        worst = max(worst, float(error / expected.abs().max()))
    return "" if worst <= BOUNDS[dtype] else f"off by {worst:.2e} of the largest value"


def _batch(pieces: list[tuple[int, int, int]], tables: list[list[int]]) -> Batch:
    from workers.batch import NO_INPUTS, BlockTables, SamplingColumns

    none = torch.zeros(0, dtype=torch.int32)
    empty = torch.zeros(0)
    places = [torch.arange(start, end, dtype=torch.int32) for _, start, end in pieces]
    return Batch(
        input_ids=torch.zeros(sum(map(len, places)), dtype=torch.int32),
        positions=torch.cat(places),
        sequence_ids=tuple(i for i, _, _ in pieces),
        seq_lens=torch.tensor([start for _, start, _ in pieces], dtype=torch.int32),
        query_lens=torch.tensor([end - start for _, start, end in pieces], dtype=torch.int32),
        block_tables=(
            BlockTables(
                block_ids=torch.tensor([tables[i] for i, _, _ in pieces], dtype=torch.int32),
                first_blocks=torch.zeros(len(pieces), dtype=torch.int32),
            ),
        ),
        block_copies=torch.zeros(0, 2, dtype=torch.int32),
        sample_index=none,
        sample_sequence=none,
        sampling=SamplingColumns(
            temperature=empty,
            top_k=none,
            top_p=empty,
            min_p=empty,
            seed=none.long(),
            min_length=none,
            presence_penalty=empty,
            frequency_penalty=empty,
            repetition_penalty=empty,
            num_logprobs=none,
        ),
        sampler_inputs=NO_INPUTS,
        defers_sampling=False,
        score_index=none,
        score_token_ids=none,
        score_num_tops=none,
    )


def check_graphs(device: torch.device, shape: shapes.Shape) -> Verdict:
    """Greedy tokens of decode steps from graphs equal those of single kernels."""
    what = f"CUDA graphs of {shape.name} = single kernels"
    if device.type != "cuda":
        return Verdict(what, None, "graphs are of CUDA devices")
    logits = []
    for enforce_eager in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            executor = shapes.load(shape, Path(folder), device, enforce_eager=enforce_eager)
        if executor.has_graphs is enforce_eager:
            return Verdict(what, "there are no graphs: --verbose tells why")
        generator = torch.Generator(device).manual_seed(1)
        for cache in executor._cached._caches:
            cache.pool.normal_(generator=generator)
        outputs = []
        rows = max(shape.rows)
        for count in (rows, 1, rows - 1):
            seq_lens = [20 + index * 37 % (shape.context - 20) for index in range(count)]
            batch = shapes.make_step(executor, seq_lens=seq_lens, query_lens=[1] * count)
            found = executor.compute_logits(batch)
            assert found is not None
            outputs.append(found.cpu())
        logits.append(outputs)
        del executor
        release(device)
    for graphed, single in zip(*logits, strict=True):
        worst = float((graphed - single).abs().max() / single.abs().max())
        if worst > BOUNDS[torch.bfloat16]:
            return Verdict(what, f"{len(single)} rows are off by {worst:.2e}")
    return Verdict(what, "")


def check_tokens(device: torch.device, folder: Path | None) -> Verdict:
    """Greedy tokens of a real model in float32 equal the CPU's."""
    what = "greedy tokens equal the CPU's"
    if folder is None:
        return Verdict(what, None, "no --model was given")
    if find_spec("psutil") is None:
        return Verdict(what, None, "the CPU's part needs psutil")
    texts = []
    for each in (torch.device("cpu"), device):
        executor = shapes.load_folder(folder, each, dtype="float32", max_num_seqs=2)
        shapes.allocate(executor, -(-len(PROMPT + [0] * NUM_TOKENS) // 16) + 1)
        text: list[int] = []
        fed, cached = PROMPT, 0
        for _ in range(NUM_TOKENS):
            batch = shapes.make_step(
                executor,
                seq_lens=[cached],
                query_lens=[len(fed)],
                tokens=torch.tensor(fed),
                reach=len(PROMPT) + NUM_TOKENS,
            )
            (token,) = executor.execute_model(batch).values()
            cached += len(fed)
            fed = [token]
            text.append(token)
        texts.append(text)
        del executor
    equal = next((i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), None)
    return Verdict(what, "" if equal is None else f"they differ from token {equal} on")
