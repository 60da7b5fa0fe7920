"""A real model under the real scheduler: hits, forks, windows, preemptions, the same tokens."""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from protos import worker_pb2
from runtime.cluster.loaded_model import loaded_model
from runtime.executor.codec import decode_result, encode_sampler_inputs, encode_step
from runtime.scheduling.cache_layout import make_cache_layout
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.limits import SchedulerLimits
from runtime.scheduling.policy import FcfsPolicy
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from tests.families import VOCABULARY
from tests.params import complete_params
from tests.quick import quick
from tests.scheduling import make_table
from tests.tiny_models import load_executor, save_tiny_model
from workers.codec import decode_plan, encode_spec, limits_of
from workers.config import CacheLayout
from workers.model_executor import ModelExecutor
from workers.sampling_codec import encode_result

pytestmark = pytest.mark.cpu

FAMILIES = ["llama", "mistral", "gemma3", "llama4", "gpt_oss"]
NUM_NEW = 14
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def executors(folders) -> dict[str, ModelExecutor]:
    return {family: load_executor(folder) for family, folder in folders.items()}


class Served:
    """One model, its scheduler and all that lies between, without a process or a port."""

    def __init__(self, executor: ModelExecutor, *, num_blocks: int, budget: int = 24) -> None:
        spec = executor.spec
        layers = loaded_model([encode_spec(spec)]).layers
        layout = make_cache_layout(
            layers,
            block_size=BLOCK_SIZE,
            memory_bytes=1 << 30,
            max_num_seqs=8,
            max_model_len=256,
            max_chunk_tokens=budget,
        )
        block_bytes = layout.block_bytes
        layout = make_cache_layout(
            layers,
            block_size=BLOCK_SIZE,
            memory_bytes=num_blocks * len(layout.groups) * block_bytes,
            max_num_seqs=8,
            max_model_len=256,
            max_chunk_tokens=budget,
        )
        worker_layout = CacheLayout(
            block_size=BLOCK_SIZE,
            num_blocks=layout.num_blocks,
            groups=tuple(group.layers for group in layout.groups),
        )
        executor.allocate_cache(worker_layout)
        self.limits = limits_of(spec, worker_layout)
        self.executor = executor
        self.scheduler = Scheduler(
            CacheManager(layout, root=b"test"),
            policy=FcfsPolicy(),
            limits=SchedulerLimits(
                max_num_batched_tokens=budget,
                max_chunk_tokens=budget,
                max_num_seqs=8,
                max_model_len=256,
            ),
            eos_token_ids=(),
        )
        self.table = make_table(max_num_seqs=8, num_groups=len(layout.groups))
        self.num_copies = 0

    def run(self, *sequences: Sequence) -> list[list[int]]:
        """Adds sequences, steps until they end, and returns what each got, forks after sources."""
        family = [each for first in sequences for each in (first, *first.forks)]
        for sequence in sequences:
            self.scheduler.add(sequence)
        while (output := self.scheduler.schedule()) is not None:
            plan = self.table.flatten(output)
            self.num_copies += len(plan.block_copies)
            message = encode_step(plan, epoch=1, return_input_hash=False)
            message += encode_sampler_inputs(plan.sampler_inputs)
            request = worker_pb2.StepRequest.FromString(message)
            batch = decode_plan(request, self.limits)
            self.executor.forward(batch)
            result = encode_result(batch, *self.executor.sample()())
            reply = worker_pb2.StepReply(step_id=plan.step_id, result=result)
            self.scheduler.update(decode_result(reply))
            self.scheduler.check_invariants()
        return [each.token_ids[each.num_prompt_tokens :].tolist() for each in family]


def make(
    sequence_id: int, prompt: list[int], *, temperature: float = 0.0, seed: int = 0
) -> Sequence:
    params = complete_params(max_tokens=NUM_NEW, temperature=temperature)
    return Sequence(sequence_id, prompt, params=params, seed=seed)


def draw(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module")
def generate(folders) -> Callable[[str, list[int]], list[int]]:
    models = {
        family: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for family, folder in folders.items()
    }

    def continue_greedily(family: str, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = models[family].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_NEW,
                pad_token_id=0,
            )
        return output[0, len(prompt) :].tolist()

    return continue_greedily


@pytest.mark.parametrize("family", quick(FAMILIES, "llama", "gemma3", "llama4"))
def test_shared_prefixes_and_preemptions_equal_transformers(family, executors, generate) -> None:
    served = Served(executors[family], num_blocks=26)
    system = draw(37, 1)
    prompts = [[*system, *draw(length, length)] for length in (1, 3, 4, 11)]
    prompts += [draw(length, length) for length in (30, 2)]
    first = served.run(make(0, prompts[0]))
    others = served.run(*(make(number, prompts[number]) for number in range(1, len(prompts))))
    answered = [*prompts[0], *first[0], 5, 6]
    (again,) = served.run(make(9, answered))

    wanted = [generate(family, prompt) for prompt in [*prompts, answered]]
    assert [*first, *others, again] == wanted
    assert served.scheduler.admission.num_cached_tokens >= 3 * 36
    if family == "llama":  # windows need few blocks
        assert served.scheduler.running.num_preemptions > 0


@pytest.mark.parametrize(
    ("length", "family"),
    quick(
        product([1, 12, 13, 31], FAMILIES),
        *((1, "mistral"), (12, "gemma3"), (13, "llama"), (13, "gpt_oss"), (31, "llama4")),
    ),
)
def test_choices_equal_requests_of_their_own(family, length, executors) -> None:
    served = Served(executors[family], num_blocks=80)
    prompt = draw(length, length)
    first = make(0, prompt, temperature=20.0, seed=11)
    for number in (1, 2, 3):
        first.fork(number, seed=11 + number)
    together = served.run(first)
    num_copies = served.num_copies
    alone = [
        Served(executors[family], num_blocks=80).run(
            make(0, prompt, temperature=20.0, seed=11 + number)
        )[0]
        for number in range(4)
    ]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) > 1
    groups = len(served.scheduler.cache.layout.groups)
    assert num_copies == (3 * groups if (length - 1) % BLOCK_SIZE else 0)


def test_a_long_context_keeps_only_its_windows(executors) -> None:
    """Gemma: a quarter of the layers see everything, the others seven tokens."""
    served = Served(executors["gemma3"], num_blocks=80, budget=16)
    held = []
    original = served.scheduler.cache.extend

    def extend(sequence: Sequence):
        change = original(sequence)
        held.append(served.scheduler.cache.num_table_blocks)
        return change

    served.scheduler.cache.extend = extend
    prompt = draw(200, 3)
    served.run(make(0, prompt))
    full = -(-(200 + NUM_NEW) // BLOCK_SIZE)
    assert max(held) <= full + 3 * (-(-(7 + 16) // BLOCK_SIZE) + 1)
