"""Buckets, padding and static tensors of CUDA graphs, with a graph that runs again what it saw."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tensor_attention import TensorAttention
from tests.tiny_models import Feeder, Row, load_executor, make_batch, save_tiny_model
from workers import model_executor
from workers.attention import choice
from workers.batch import TokenReferences
from workers.cuda_graphs import buckets, pad

pytestmark = pytest.mark.cpu

ROWS = 11
VOCABULARY = 128


class AgainGraph:
    """As a graph on a device: what is captured reads and writes the same places for ever."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, run: Any) -> None:
        self._run = run
        run()
        logits, _ = run.args
        self.rows = len(logits)
        # As on a device: nothing has run yet that counts.
        logits.fill_(float("nan"))

    @torch.inference_mode()
    def replay(self) -> None:
        self.num_replays += 1
        self._run()


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 64, 65, 80, 81, 256])
def test_buckets_rise_to_the_most_rows(most: int) -> None:
    sizes = buckets(most)

    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    # Padding is less than a tile, or than half of the rows.
    assert all(size - 1 - last < max(16, last) for last, size in pairwise(sizes))


@pytest.fixture(params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[AgainGraph]:
    """Those that the next executor captures."""
    made: list[AgainGraph] = []

    def make() -> AgainGraph:
        made.append(AgainGraph())
        return made[-1]

    monkeypatch.setitem(choice.BACKENDS, "mixed", lambda *_, **__: Mixed())
    monkeypatch.setattr(
        model_executor,
        "graph_maker",
        lambda device, backend, model, enforce_eager: (
            (lambda: make) if backend.is_capturable else None
        ),
    )
    return made


def load_graphed(folder: Path, max_rows: int, *, num_blocks: int = 192) -> Feeder:
    executor = load_executor(folder, attention="mixed", max_num_seqs=max_rows)
    return Feeder(executor, num_blocks=num_blocks)


class Mixed(TensorAttention):
    """Prefill by the reference."""

    def attend(self, *tensors: object, **settings: object) -> torch.Tensor:
        metadata = tensors[4]
        if metadata.max_query_len > 1:
            return choice.ReferenceAttention().attend(*tensors, **settings)
        return super().attend(*tensors, **settings)


def test_graphs_give_what_single_kernels_give(folder: Path, graphs: list[AgainGraph]) -> None:
    """Sequences come and go: what a bigger step left in the static tensors does no harm."""
    eager = Feeder(load_executor(folder, attention="reference"), num_blocks=600)
    graphed = load_graphed(folder, ROWS, num_blocks=600)
    draw = random.Random(0)
    steps = [[(i, draw.randrange(1, 16)) for i in range(ROWS)]]
    for number in (ROWS, 3, 1, 8, 2, 9, 4, ROWS):
        steps.append([(i, 1) for i in draw.sample(range(ROWS), number)])

    for step in steps:
        texts = {i: [draw.randrange(VOCABULARY) for _ in range(size)] for i, size in step}
        found = [
            feeder.executor.compute_logits(
                make_batch([feeder.row(i, text) for i, text in texts.items()])
            )
            for feeder in (eager, graphed)
        ]
        assert torch.allclose(*found, atol=1e-5)

    assert [graph.rows for graph in graphs] == [11, 8, 4, 2, 1]
    assert [graph.num_replays for graph in graphs] == [3, 1, 2, 1, 1]


def test_samples_of_the_step_before_are_fed(folder: Path, graphs: list[AgainGraph]) -> None:
    """They never pass the host: padded rows and a row that refers to nothing are beside them."""
    feeder = load_graphed(folder, 4)
    executor = feeder.executor
    first = make_batch([feeder.row(number, [5 + number]) for number in range(3)])
    executor.forward(replace(first, step_id=1, shares_samples=True))
    sampled, _ = executor.sample()()
    _, b, c = sampled.token_ids.tolist()
    rows = [feeder.row(number, [0]) for number in range(3)]
    batch = replace(make_batch(rows), step_id=2)
    references = TokenReferences(
        rows=torch.tensor([0, 2]), step_ids=torch.tensor([1, 1]), sample_rows=torch.tensor([2, 1])
    )

    fed = executor.forward(replace(batch, references=references)).tolist()
    _, logits = executor._pending

    assert fed == [c, 0, b]
    told = replace(batch, input_ids=torch.tensor(fed, dtype=torch.int32))
    assert executor.compute_logits(told).equal(logits)
    assert sum(graph.num_replays for graph in graphs) == 3


def test_what_is_no_plain_decode_step_is_launched_kernel_by_kernel(
    folder: Path, graphs: list[AgainGraph]
) -> None:
    feeder = load_graphed(folder, 2)
    for number in range(3):
        feeder.executor.compute_logits(make_batch([feeder.row(number, [1, 2, 3])]))

    def run(*rows: object) -> int:
        feeder.executor.compute_logits(make_batch(rows))
        return sum(graph.num_replays for graph in graphs)

    assert run(feeder.row(0, [4], sample=())) == 0
    assert run(feeder.row(0, [4]), feeder.row(1, [4, 5])) == 0
    assert run(*(feeder.row(number, [6]) for number in range(3))) == 0
    assert run(*(feeder.row(number, [6]) for number in range(2))) == 1


def test_padded_rows_touch_no_block_of_a_sequence(folder: Path, graphs: list[AgainGraph]) -> None:
    feeder = load_graphed(folder, 4, num_blocks=20)
    batch = make_batch([feeder.row(0, [1]), feeder.row(1, [2]), feeder.row(2, [3])])
    caches = feeder.executor._cached._caches
    feeder.executor.compute_logits(batch)

    pool = caches[0].pool
    assert len(pool) == feeder.layout.num_blocks + 1
    used = {int(tables.block_ids[row, 0]) for tables in batch.block_tables for row in range(3)}
    unused = set(range(feeder.layout.num_blocks)) - used
    assert unused
    assert not pool[sorted(unused)].any()
    assert pool[-1].any()


def test_a_padded_batch_keeps_its_rows() -> None:
    batch = make_batch(
        [
            Row(sequence_id=7, tokens=[5], seq_len=9, block_tables=[[3, 1]]),
            Row(sequence_id=8, tokens=[6], seq_len=2, block_tables=[[2]]),
        ]
    )
    padded = pad(batch, 4, 99)

    assert padded.input_ids.tolist() == [5, 6, 0, 0]
    assert padded.positions.tolist() == [9, 2, 0, 0]
    assert padded.seq_lens.tolist() == [9, 2, 0, 0]
    assert padded.query_lens.tolist() == [1, 1, 1, 1]
    assert padded.sample_index.tolist() == [0, 1, 2, 3]
    assert padded.block_tables[0].block_ids.tolist() == [[3, 1], [2, 0], [99, 99], [99, 99]]
    assert pad(batch, 2, 99) is batch
