"""Layers of every kind and several shapes in one pool: scheduler, wire, cache and attention."""

import random
from dataclasses import replace

import pytest
import torch

from protos import worker_pb2
from runtime.cluster.loaded_model import loaded_model
from runtime.executor.codec import encode_step
from runtime.scheduling.cache_layout import make_cache_layout
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.limits import SchedulerLimits
from runtime.scheduling.policy import FcfsPolicy
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import StepResult
from tests.plain_attention import plain_attention
from tests.scheduling import make_sequence, make_table
from tests.transport import model_spec
from workers.attention.base import build_inputs
from workers.attention.reference import ReferenceAttention
from workers.batch import Batch
from workers.codec import decode_plan, encode_spec, limits_of
from workers.config import CacheLayout, LayerCacheSpec
from workers.kv_cache import allocate, copy_blocks
from workers.staging import Staging

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
NUM_HEADS = 4
VOCABULARY = 40
MAX_MODEL_LEN = 128


def make_layer(
    heads: int, k_dim: int, v_dim: int, *, window: int = 0, chunk: int = 0
) -> LayerCacheSpec:
    return LayerCacheSpec(
        window=window, chunk=chunk, num_kv_heads=heads, k_dim=k_dim, v_dim=v_dim, element_bytes=4
    )


# Local and full ones alternate, and no two kinds have one shape.
MIXED = (
    make_layer(2, 6, 5, chunk=12),
    make_layer(1, 4, 7, window=9),
    make_layer(2, 6, 3, chunk=12),
    make_layer(4, 5, 5),
    make_layer(2, 6, 5, chunk=12),
    make_layer(1, 4, 7, window=9),
    make_layer(1, 9, 2, chunk=12),
    make_layer(4, 3, 5),
)
CHUNKS_ALONE = tuple(replace(layer, window=0, chunk=8) for layer in MIXED[:3])


class Attentions:
    """A driver's half and a rank's, whose model is attention layers side by side.

    What a layer gets of a token depends on its id and position alone. Every step's attention is
    compared with that over all tokens of the sequences.
    """

    def __init__(self, layers: tuple[LayerCacheSpec, ...], *, num_blocks: int, budget: int) -> None:
        self.layers = layers
        spec = model_spec(layers=layers, vocab_size=VOCABULARY, max_model_len=MAX_MODEL_LEN)
        layout = make_cache_layout(
            loaded_model([encode_spec(spec)]).layers,
            block_size=4,
            memory_bytes=1 << 30,
            max_num_seqs=4,
            max_model_len=MAX_MODEL_LEN,
            max_chunk_tokens=budget,
        )
        layout = replace(layout, num_blocks=num_blocks * len(layout.groups))
        groups = tuple(group.layers for group in layout.groups)
        worker_layout = CacheLayout(block_size=4, num_blocks=layout.num_blocks, groups=groups)
        self.caches, cache_bytes = allocate(
            layers, worker_layout, dtype=torch.float32, device=CPU, available_bytes=1 << 30
        )
        assert cache_bytes == layout.num_blocks * layout.block_bytes
        self.caches[0].pool.fill_(float("nan"))  # what nobody has written is read by nobody
        self.group_of = {layer: index for index, each in enumerate(groups) for layer in each}
        self.limits = limits_of(spec, worker_layout)
        self.table = make_table(max_num_seqs=4, num_groups=len(groups))
        self.scheduler = Scheduler(
            CacheManager(layout, root=b"test"),
            policy=FcfsPolicy(),
            limits=SchedulerLimits(
                max_num_batched_tokens=budget,
                max_chunk_tokens=budget,
                max_num_seqs=4,
                max_model_len=min(MAX_MODEL_LEN, layout.max_sequence_tokens),
            ),
            eos_token_ids=(),
        )
        self.sequences: dict[int, Sequence] = {}
        self.num_copies = 0
        generator = torch.Generator().manual_seed(2)
        # By layer: what its query, key and value get of each id and of each position.
        self.parts = [
            [
                [torch.randn(size, heads, dim, generator=generator) for size in SIZES]
                for heads, dim in (
                    (NUM_HEADS, layer.k_dim),
                    (layer.num_kv_heads, layer.k_dim),
                    (layer.num_kv_heads, layer.v_dim),
                )
            ]
            for layer in layers
        ]

    def inputs(self, layer: int, ids: torch.Tensor, places: torch.Tensor) -> list[torch.Tensor]:
        return [of_id[ids] + of_place[places] for of_id, of_place in self.parts[layer]]

    def run(self, *sequences: Sequence) -> None:
        """Adds sequences and steps until they end; now and then one gives way."""
        for sequence in sequences:
            self.scheduler.add(sequence)
            for each in (sequence, *sequence.forks):
                self.sequences[each.sequence_id] = each
        while (output := self.scheduler.schedule()) is not None:
            plan = self.table.flatten(output)
            message = encode_step(plan, epoch=1, return_input_hash=False)
            batch = decode_plan(worker_pb2.StepRequest.FromString(message), self.limits)
            if len(batch.block_copies):
                copy_blocks(self.caches, batch.block_copies)
                self.num_copies += len(batch.block_copies)
            for layer in range(len(self.layers)):
                self.check(batch, layer)
            ids = plan.sequence_ids[plan.sample_sequence].tolist()
            tokens = [(7 * each + plan.step_id) % VOCABULARY for each in ids]
            self.scheduler.update(
                StepResult(step_id=plan.step_id, sequence_ids=ids, token_ids=tokens)
            )
            running = list(self.scheduler.running.sequences.values())
            if running and plan.step_id % 7 == 0:
                self.scheduler.running.preempt(running[-1])
            self.scheduler.check_invariants()

    def check(self, batch: Batch, layer: int) -> None:
        spec = self.layers[layer]
        metadata = build_inputs(batch, block_size=4, staging=Staging(CPU)).groups[
            self.group_of[layer]
        ]
        settings = {
            "scale": 0.5,
            "window": spec.window,
            "chunk": spec.chunk,
            "softcap": 0.0,
            "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        }
        fed = self.inputs(layer, batch.input_ids.long(), batch.positions.long())
        found = ReferenceAttention().attend(*fed, self.caches[layer], metadata, **settings)
        pieces = found.split(batch.query_lens.tolist())
        for sequence_id, piece, (seq_len, query_len) in zip(
            batch.sequence_ids, pieces, metadata.extents, strict=True
        ):
            end = seq_len + query_len
            ids = torch.tensor(self.sequences[sequence_id].token_ids[:end].tolist())
            whole = plain_attention(*self.inputs(layer, ids, torch.arange(end)), **settings)
            assert torch.allclose(piece, whole[seq_len:], atol=1e-5), (layer, sequence_id, seq_len)


SIZES = (VOCABULARY, MAX_MODEL_LEN)


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are too small to be shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("layers", [MIXED, CHUNKS_ALONE], ids=["mixed", "chunks"])
@pytest.mark.parametrize("budget", [7, 32])
def test_attention_is_right_over_hits_forks_and_preemptions(
    layers: tuple[LayerCacheSpec, ...], budget: int
) -> None:
    run = Attentions(layers, num_blocks=17, budget=budget)
    system = draw(30, 0)
    prompts = [[*system, *draw(length, length)] for length in (1, 4, 9)] + [draw(26, 9)]
    run.run(make_sequence(0, prompts[0], max_tokens=9))
    family = make_sequence(1, prompts[1], max_tokens=14)
    family.fork(2, seed=2)
    run.run(family, *(make_sequence(3 + i, prompts[2 + i], max_tokens=20) for i in range(2)))
    said = run.sequences[3].token_ids.tolist()
    run.run(make_sequence(9, [*said, 1, 2], max_tokens=12))

    assert run.scheduler.admission.num_cached_tokens >= 2 * 28
    assert run.num_copies > 0
    assert run.scheduler.running.num_preemptions > 0


def test_groups_of_the_mixed_layers() -> None:
    run = Attentions(MIXED, num_blocks=20, budget=8)
    layout = run.scheduler.cache.layout
    assert [(group.window, group.chunk, group.layers) for group in layout.groups] == [
        (0, 0, (3,)),
        (0, 0, (7,)),
        (0, 12, (0, 2)),
        (0, 12, (4, 6)),
        (9, 0, (1, 5)),
    ]
