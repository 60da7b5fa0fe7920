"""Resumption by clients: what it may cost, whom it overtakes, where a scored prompt goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import inference_pb2
from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.scheduling.limits import QueueLimits
from tests.frontend import Client, RunningFrontend, status_of
from tests.served import UnhurriedOracle, make_engine, write_characters

pytestmark = pytest.mark.wire

TOKEN = "engine-token"
PROMPT = [*range(3, 23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_characters(tmp_path_factory.mktemp("model"))


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[tuple[Engine, Client]]:
    engine, _ = make_engine(
        UnhurriedOracle,
        path=str(folder),
        num_blocks=4000,
        model={"fingerprint": "same"},
        **options,
    )
    engine.start()
    server = EngineServer(engine, TOKEN)
    server.start()
    try:
        with (
            RunningFrontend(server) as frontend,
            grpc.insecure_channel(frontend.address) as channel,
        ):
            yield engine, Client(channel)
    finally:
        server.stop(grace_s=5)
        engine.stop()


def resume_of(first: inference_pb2.GenerateResponse, **fields: Any) -> inference_pb2.Resume:
    """What a client knows of a stream by its first message alone."""
    known = {
        "seed": first.seed,
        "model_fingerprint": first.model_fingerprint,
        "prompt_token_ids": inference_pb2.TokenIds(ids=first.prompt_token_ids),
        "proof": first.resume_proof,
    }
    return inference_pb2.Resume(**known | fields)


def test_who_was_let_in_before_comes_in_and_who_only_says_so_does_not(folder: Path) -> None:
    limits = QueueLimits(max_queued_requests=1)
    long = {"max_tokens": 2000, "ignore_eos": True}
    with serving(folder, max_num_seqs=1, queue=limits) as (engine, client):
        broken = client.generate(token_ids=PROMPT, **long)
        first = next(broken)
        broken.cancel()
        running = client.generate(token_ids=[5], **long)
        next(running)
        queued = client.generate(token_ids=[6], max_tokens=2)
        while engine.stats().num_waiting < 1:
            pass
        outputs = [inference_pb2.TokenIds(ids=first.token_ids)]
        for wrong in (
            {"proof": b""},
            {"proof": b"", "outputs": outputs},
            {"proof": b"made up", "outputs": outputs},
            {"seed": 1},
        ):
            code, details = status_of(client.generate(resume=resume_of(first, **wrong), **long))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, wrong
            assert "max_queued_requests=1" in details
        right = client.generate(resume=resume_of(first, outputs=outputs), **long)
        while engine.stats().num_waiting < 2:
            pass
        running.cancel()
        next(right)  # before who came before it
        assert engine.stats().num_waiting == 1
        right.cancel()
        list(queued)


def test_without_a_proof_it_goes_on_all_the_same(folder: Path) -> None:
    options = {"max_tokens": 30, "ignore_eos": True}
    with serving(folder) as (_, client):
        whole = list(client.generate(token_ids=PROMPT, seed=7, **options))
        wanted = [token for each in whole for token in each.token_ids]
        received = [*whole[0].token_ids]
        outputs = [inference_pb2.TokenIds(ids=received)]
        resume = resume_of(whole[0], proof=b"", outputs=outputs)
        for each in client.generate(resume=resume, **options):
            received += each.token_ids
    assert received == wanted


def entries_of(responses: list[inference_pb2.GenerateResponse]) -> list[tuple[int, float]]:
    return [(each.token_id, each.logprob) for one in responses for each in one.prompt_logprobs]


def test_a_prompt_is_scored_on_from_where_it_was(folder: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "prompt_logprobs": 0}
    with serving(folder, max_num_batched_tokens=32, max_num_scored_tokens=4) as (_, client):
        whole = list(client.generate(token_ids=PROMPT, seed=7, **options))
        wanted = entries_of(whole)
        assert [token for token, _ in wanted] == PROMPT
        for num_received in (0, 1, 2, len(whole[0].prompt_logprobs), 19, 20):
            resume = resume_of(whole[0], num_prompt_logprobs=num_received)
            rest = list(client.generate(resume=resume, **options))
            assert entries_of(rest) == wanted[num_received:], num_received
        # With a token of its first choice it has all of them.
        tokens = [token for each in whole for token in each.token_ids]
        for num_received in (0, 20):
            outputs = [inference_pb2.TokenIds(ids=tokens[:1])]
            resume = resume_of(whole[0], num_prompt_logprobs=num_received, outputs=outputs)
            assert entries_of(list(client.generate(resume=resume, **options))) == []


def test_too_many_received_tokens_are_refused(folder: Path) -> None:
    with serving(folder) as (_, client):
        outputs = [inference_pb2.TokenIds(ids=[5] * 65_536)] * 5
        resume = inference_pb2.Resume(seed=1, model_fingerprint="same", outputs=outputs)
        code, details = status_of(client.generate(resume=resume, n=5))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("resume.outputs has 327680 tokens in all: must be at most 262144")
