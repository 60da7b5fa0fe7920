"""The whole road: client, frontend, engine, Ray, two ranks, the embedded model."""

import random
import time
from collections.abc import Iterator, Sequence

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protos import common_pb2, inference_pb2
from tests.builders import demo_model_folder
from tests.cluster.stack import Server, collect, request, serving
from tests.quick import quick

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

BUDGET = 64
PROMPT_LENGTHS = (3, 11, 40, 64, 65, 150, 333, 600)
FEW_LENGTHS = (11, 65)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        "--model=demo",
        "--tp=2",
        "--launcher=ray",
        "--dtype=float32",
        f"--max-num-batched-tokens={BUDGET}",
        "--max-num-seqs=16",
        "--kv-memory=256MiB",
        "--check-ranks",
    ) as server:
        yield server


def draw_prompts(lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(1)
    return [[2, *(draw.randrange(1000, 200_000) for _ in range(n - 1))] for n in lengths]


@pytest.mark.parametrize(
    ("lengths", "num_tokens"),
    quick([(FEW_LENGTHS, 10), (PROMPT_LENGTHS, 48)], (FEW_LENGTHS, 10)),
    ids=["few", "many"],
)
def test_tokens_are_those_of_transformers(
    server: Server, lengths: Sequence[int], num_tokens: int
) -> None:
    """Greedy, fp32, submitted together: prompts are chunked and batches mixed."""
    prompts = draw_prompts(lengths)
    stub = server.stub()
    before = stats_of(server)
    streams = [
        stub.Generate(request(prompt, temperature=0, max_tokens=num_tokens), metadata=server.key)
        for prompt in prompts
    ]
    answers = [collect(stream) for stream in streams]

    model = AutoModelForCausalLM.from_pretrained(demo_model_folder(), dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
        )
        assert answer.token_ids == output[0, len(prompt) :].tolist(), f"prompt of {len(prompt)}"

    stats = stats_of(server)
    num_steps = stats.num_steps - before.num_steps
    num_sequences = stats.num_scheduled_sequences - before.num_scheduled_sequences
    assert num_sequences > num_steps, "nothing was batched"
    assert stats.num_scheduled_tokens <= BUDGET * stats.num_steps
    assert num_steps >= sum(lengths) / BUDGET


def test_text_is_what_the_tokenizer_makes_of_the_tokens(server: Server) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder())
    prompt = "The three largest cities of Japan are"
    stream = server.stub().Generate(
        request(prompt, temperature=0, max_tokens=24), metadata=server.key
    )
    answer = collect(stream)
    ids = tokenizer(prompt).input_ids
    whole = tokenizer.decode(ids + answer.token_ids, skip_special_tokens=True)
    assert whole == tokenizer.decode(ids, skip_special_tokens=True) + answer.text
    assert "Tokyo" in answer.text


def test_a_seed_is_returned_and_reproduces(server: Server) -> None:
    stub = server.stub()
    first = collect(stub.Generate(request("Once", max_tokens=12), metadata=server.key))
    again = stub.Generate(request("Once", max_tokens=12, seed=first.seed), metadata=server.key)
    assert collect(again) == first


BAD_REQUESTS = [
    (request(""), "prompt"),
    (inference_pb2.GenerateRequest(), "prompt"),
    (request([2, -1]), "-1"),
    (request([2, 262144]), "262144"),
    (request([2] * 10, max_tokens=10**6), "max_tokens=1000000"),
    (request("hi", max_tokens=0), "max_tokens=0"),
    (request("hi", max_tokens=-5), "max_tokens=-5"),
    (request("hi", temperature=-1), "temperature=-1.0"),
    (request("hi", temperature=float("nan")), "temperature=nan"),
    (request("hi", top_p=0), "top_p=0.0"),
    (request("hi", top_p=1.5), "top_p=1.5"),
    (request("hi", top_k=-2), "top_k=-2"),
    (request("x" * 5_000_000), "max_prompt_bytes"),
]


def test_bad_requests_are_refused_and_harm_nobody(server: Server) -> None:
    stub = server.stub()
    good = request("A good request goes on", temperature=0, max_tokens=24)
    alone = collect(stub.Generate(good, metadata=server.key))
    beside = stub.Generate(good, metadata=server.key)
    for bad, named in BAD_REQUESTS:
        with pytest.raises(grpc.RpcError) as refusal:
            collect(stub.Generate(bad, metadata=server.key))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in refusal.value.details()
    undisturbed = collect(beside)
    assert (undisturbed.token_ids, undisturbed.text) == (alone.token_ids, alone.text)
    wait_until_idle(server)


def test_a_client_that_vanishes_leaves_no_blocks(server: Server) -> None:
    stub = server.stub()
    stream = stub.Generate(
        request("Forever", max_tokens=2000, ignore_eos=True), metadata=server.key
    )
    next(stream)
    assert stats_of(server).num_running == 1
    stream.cancel()
    wait_until_idle(server)


def test_no_key_no_service(server: Server) -> None:
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        with pytest.raises(grpc.RpcError) as refusal:
            collect(server.stub().Generate(request("hi"), metadata=metadata))
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


def stats_of(server: Server) -> common_pb2.EngineStats:
    response = server.stub().GetStats(inference_pb2.GetStatsRequest(), metadata=server.key)
    return response.engines[0].stats


def wait_until_idle(server: Server) -> None:
    """Asks until nothing runs any more, and checks that all blocks are free then."""
    deadline = time.monotonic() + 10
    while True:
        stats = stats_of(server)
        if stats.num_running == stats.num_waiting == 0:
            assert stats.num_free_blocks == stats.num_blocks
            return
        assert time.monotonic() < deadline, stats
