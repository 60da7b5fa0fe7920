"""Client, frontend and engine together, over the oracle."""

from collections.abc import Iterator

import grpc
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer
from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.sampling_params import fork_seed
from runtime.structured import NoCompiler
from tests.frontend import API_KEY, RunningFrontend, make_model
from tests.scheduling import (
    EOS,
    VOCAB_SIZE,
    make_scheduler,
    oracle_continuation,
)
from tests.served import UnhurriedOracle

pytestmark = pytest.mark.wire

TIMEOUT_S = 30


@pytest.fixture
def engine(tmp_path) -> Iterator[Engine]:
    scheduler = make_scheduler(num_blocks=512)
    model = make_model(
        str(tmp_path),
        vocab_size=VOCAB_SIZE,
        max_model_len=scheduler.limits.max_model_len,
        eos_token_ids=(EOS,),
    )
    engine = Engine(
        model=model,
        scheduler=scheduler,
        compiler=NoCompiler("a test has no tokenizer"),
        executor=UnhurriedOracle(scheduler.cache.layout),
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def stub(engine: Engine) -> Iterator[inference_pb2_grpc.InferenceStub]:
    server = EngineServer(engine, "engine-token")
    server.start()
    with RunningFrontend(server) as frontend, grpc.insecure_channel(frontend.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    server.stop(grace_s=5)


def generate(
    stub: inference_pb2_grpc.InferenceStub, prompt: list[int], **params: object
) -> grpc.Call:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling_params=common_pb2.SamplingParams(**params),
    )
    return stub.Generate(request, metadata=bearer(API_KEY), timeout=TIMEOUT_S)


def test_every_client_gets_its_own_continuation(
    stub: inference_pb2_grpc.InferenceStub,
) -> None:
    prompts = [[7 + index] * (1 + 9 * index) for index in range(12)]
    calls = [generate(stub, prompt, max_tokens=20) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        responses = list(call)
        tokens = [token for response in responses for token in response.token_ids]
        assert tokens == oracle_continuation(prompt, max_tokens=20, seed=responses[0].seed)
        assert responses[-1].usage.num_output_tokens == len(tokens)


def test_choices_get_what_their_seeds_give_alone(stub: inference_pb2_grpc.InferenceStub) -> None:
    prompt = [7] * 40
    responses = list(generate(stub, prompt, max_tokens=20, n=3, seed=5))
    num_output_tokens = 0
    for index in range(3):
        choice = [response for response in responses if response.index == index]
        tokens = [token for response in choice for token in response.token_ids]
        seed = fork_seed(5, index)
        assert choice[0].seed == seed
        assert tokens == oracle_continuation(prompt, max_tokens=20, seed=seed)
        num_output_tokens += len(tokens)
    assert responses[-1].usage.num_output_tokens == num_output_tokens


def test_a_client_that_leaves_gives_its_blocks_back(
    engine: Engine, stub: inference_pb2_grpc.InferenceStub
) -> None:
    call = generate(stub, [5] * 40, max_tokens=1900, ignore_eos=True)
    next(call)
    call.cancel()
    while stats(stub).num_running:  # each call is a round trip, and bounded by the test's timeout
        assert stats(stub).num_output_tokens < 1900, "it ran to its end"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.stats().num_output_tokens < 1900


def stats(stub: inference_pb2_grpc.InferenceStub) -> common_pb2.EngineStats:
    request = inference_pb2.GetStatsRequest()
    return stub.GetStats(request, metadata=bearer(API_KEY), timeout=TIMEOUT_S).engines[0].stats
