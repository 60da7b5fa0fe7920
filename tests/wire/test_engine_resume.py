"""Going on with requests in an engine that has never seen them, and an engine that drains."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from protos import engine_pb2, engine_pb2_grpc
from protos.auth import bearer
from runtime import engine_codec
from runtime.engine_service import EngineServer
from runtime.errors import CapacityError, InvalidRequestError, UnavailableError
from runtime.grammar.compiler import GrammarCompiler
from runtime.request import Request, ResumedChoice
from runtime.scheduling.limits import QueueLimits
from tests.frontend import FakeEngine, make_model
from tests.params import complete_params
from tests.scheduling import oracle_scores
from tests.served import Served, make_engine
from tests.structured import (
    PROMPT,
    Client,
    HeldCompiler,
    Running,
    make_compiler,
    write_tokenizer,
)

pytestmark = pytest.mark.wire

TOKEN = "engine-token"
TIMEOUT_S = 30
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(folder)
    yield compiler
    compiler.close()


def answers(served: Any, request_id: int, *, n: int) -> list[tuple[list[int], Any]]:
    """Tokens and finish reason of each choice, as far as there are."""
    keys = [(request_id, choice) for choice in range(n)]
    return [
        (served.tokens[key], served.ends[key].finish_reason if key in served.ends else None)
        for key in keys
    ]


def cut(tokens: list[int], length: int) -> ResumedChoice:
    """What somebody has who has seen so many tokens, and the end with the last of them."""
    return ResumedChoice(tuple(tokens[:length]), length >= len(tokens))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"prompt_logprobs": 2, "logprobs": 3},
        {"min_tokens": 5, "stop_token_ids": tuple(range(0, 997, 6))},
        {"presence_penalty": 0.5, "logit_bias": {3: 1.0}},
    ],
    ids=["plain", "scored", "ends", "penalties"],
)
@pytest.mark.parametrize("n", [1, 3])
def test_the_rest_is_that_of_the_undisturbed_request(params: dict[str, Any], n: int) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    options = {"max_tokens": MAX_TOKENS, "n": n, "params": params}
    whole = Served()
    whole.add(7, prompt, **options)
    whole.drain()
    wanted = answers(whole, 7, n=n)
    draw = random.Random(n)
    for length in range(MAX_TOKENS):
        cuts = [length, *(draw.randrange(MAX_TOKENS + 1) for _ in range(n - 1))]
        resumed = tuple(cut(*each) for each in zip((t for t, _ in wanted), cuts, strict=True))
        if all(each.has_ended for each in resumed):
            continue
        served = Served()
        served.add(7, prompt, **options, resumed=resumed)
        served.drain()
        assert not served.failures
        for choice, (past, (tokens, reason)) in enumerate(zip(resumed, wanted, strict=True)):
            key = (7, choice)
            assert [*past.token_ids, *served.tokens[key]] == tokens
            assert served.logprobs[key] == whole.logprobs[key][len(past.token_ids) :]
            assert (key in served.ends) != past.has_ended
            assert past.has_ended or served.ends[key].finish_reason is reason
        is_scored = bool(params.get("prompt_logprobs")) and not resumed[0].token_ids
        assert served.scores[7, 0] == (oracle_scores(prompt) if is_scored else [])


def test_cached_tokens_of_a_resumed_request_are_those_of_the_prompt() -> None:
    served = Served()
    served.add(1, list(range(1, 10)), max_tokens=20, ignore_eos=True)
    served.drain()
    past = ResumedChoice(tuple(served.tokens[1, 0][:15]))
    served.tokens.clear(), served.ends.clear()
    served.add(1, list(range(1, 10)), max_tokens=20, ignore_eos=True, resumed=(past,))
    served.drain()
    assert served.ends[1, 0].num_cached_tokens == 9


def test_a_full_engine_takes_resumed_requests() -> None:
    served = Served(max_num_seqs=1, queue=QueueLimits(max_queued_requests=0, queue_timeout_s=3.0))
    served.add(1, [1, 2], max_tokens=9, ignore_eos=True)
    served.engine.step()
    served.add(2, [1, 2])
    assert isinstance(served.failures[2], CapacityError)
    for request_id in (3, 4):
        past = (ResumedChoice((5,)), ResumedChoice())
        served.add(request_id, [1, 2], n=2, ignore_eos=True, resumed=past, was_accepted=True)
    served.drain()
    assert {*served.ends} == {(1, 0), (3, 0), (3, 1), (4, 0), (4, 1)}
    assert [len(served.tokens[4, choice]) for choice in (0, 1)] == [3, 4]


def test_a_wrong_resume_is_refused_alone() -> None:
    served = Served()
    served.add(1, [1, 2], resumed=(ResumedChoice((997,)),))
    served.add(2, [1, 2])
    served.drain()
    assert str(served.failures[1]) == (
        "resumed[0] token id 997 must be in [0, 997), the vocabulary"
    )
    assert [*served.ends] == [(2, 0)]


def test_an_abort_ends_the_choices_that_went_on() -> None:
    served = Served()
    past = (ResumedChoice((5,)), ResumedChoice((6,), has_ended=True), ResumedChoice((7,)))
    served.add(1, [1, 2], n=3, max_tokens=50, ignore_eos=True, resumed=past)
    served.engine.step()
    served.abort(1, 1)  # of which nothing is known
    served.abort(1, 2)
    served.engine.step()
    assert [len(served.tokens[1, choice]) for choice in range(3)] == [2, 0, 1]
    served.abort(1)
    assert not served.engine.has_work


STRUCTURES = [
    {"regex": "[a-z]{3}-[0-9]{3,6}"},
    {"json_schema": '{"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 3}'},
    {"choices": ("positive", "negative", "neutral")},
]


def resume(
    client: Client,
    request_id: int,
    *past: ResumedChoice,
    was_accepted: bool = True,
    **params: Any,
) -> None:
    """As `client.add`, from where it stands."""
    sampling = complete_params(max_tokens=160, n=len(past), **params)
    client.connection.add(
        Request(
            request_id=request_id,
            prompt_token_ids=PROMPT,
            params=sampling,
            seed=request_id,
            resumed=past,
            was_accepted=was_accepted,
        )
    )


@pytest.mark.parametrize("params", STRUCTURES, ids=["regex", "json_schema", "choices"])
def test_a_structure_goes_on_from_every_point(
    compiler: GrammarCompiler, params: dict[str, Any]
) -> None:
    with Running(compiler) as running:
        running.client.add(1, n=2, **params)
        running.client.wait(2)
        wanted = [running.client.tokens[1, choice] for choice in (0, 1)]
    for length in range(max(map(len, wanted))):
        past = [cut(tokens, length) for tokens in wanted]
        with Running(compiler) as running:
            resume(running.client, 1, *past, **params)
            running.client.wait(sum(not each.has_ended for each in past))
            for choice, tokens in enumerate(wanted):
                assert running.client.tokens[1, choice] == tokens[length:]
            assert not running.engine._structured._matchers


def test_an_output_that_is_not_of_the_structure_fails_alone(compiler: GrammarCompiler) -> None:
    with Running(compiler) as running:
        resume(running.client, 1, ResumedChoice(), ResumedChoice((5, 5, 5)), regex="[0-9]{3}")
        running.client.add(2, regex="[0-9]{3}")
        running.client.wait(2)
        assert isinstance(running.client.failures[1], InvalidRequestError)
        assert str(running.client.failures[1]).startswith("resumed[1]: regex: after ")
        assert running.client.text(2).isdigit()
        assert not running.engine._structured._matchers


def test_resumed_requests_may_always_wait_for_their_structure(compiler: GrammarCompiler) -> None:
    held = HeldCompiler(compiler)
    with Running(held, queue=QueueLimits(max_queued_requests=1)) as running:
        client = running.client
        client.add(1, regex="[0-9]{3}")
        client.add(2, regex="[0-9]{3}")
        client.wait()
        assert isinstance(client.failures[2], CapacityError)
        resume(client, 3, ResumedChoice(), regex="[0-9]{3}")
        resume(client, 4, ResumedChoice(), was_accepted=False, regex="[0-9]{3}")
        client.wait()
        assert isinstance(client.failures[4], CapacityError)
        held.release()
        held.release()
        client.wait(2)
        assert {*client.reasons} == {(1, 0), (3, 0)}


def test_a_draining_engine_refuses_and_ends_what_it_has(compiler: GrammarCompiler) -> None:
    held = HeldCompiler(compiler)
    with Running(held) as running:
        told = threading.Event()
        running.engine.on_drain(told.set)
        client = running.client
        client.add(1, max_tokens=50)
        client.add(2, regex="[0-9]{3}")  # waits to be compiled
        running.engine.drain()
        running.engine.drain()
        assert told.wait(TIMEOUT_S)
        resume(client, 3, ResumedChoice((5,)))
        client.wait(2)
        assert isinstance(client.failures[3], UnavailableError)
        assert str(client.failures[3]) == "the engine is draining and takes no more requests"
        assert [*client.reasons] == [(1, 0)]
        assert not running.engine.wait_idle(0)
        held.release()
        client.wait()
        assert client.text(2).isdigit()
        assert running.engine.wait_idle(TIMEOUT_S)


def test_an_engine_without_requests_is_drained_at_once() -> None:
    engine, _ = make_engine()
    engine.start()
    assert not engine.wait_idle(0)
    engine.drain()
    assert engine.wait_idle(TIMEOUT_S)
    engine.stop()


def test_an_engine_that_ends_while_it_drains_keeps_nobody_waiting() -> None:
    engine, _ = make_engine()
    engine.start()
    engine.stop()
    assert engine.wait_idle(TIMEOUT_S)


def test_frontends_are_told_of_draining() -> None:
    engine = FakeEngine(make_model())
    server = EngineServer(engine, TOKEN)
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            outboxes: list[SimpleQueue[engine_pb2.FrontendMessage | None]] = []

            def connect() -> Iterator[engine_pb2.EngineMessage]:
                outboxes.append(SimpleQueue())
                return engine_pb2_grpc.EngineStub(channel).Connect(
                    iter(outboxes[-1].get, None), metadata=bearer(TOKEN), timeout=TIMEOUT_S
                )

            before = connect()
            assert next(before).WhichOneof("message") == "info"
            engine.tell_draining()
            later = connect()
            assert next(later).WhichOneof("message") == "info"
            assert next(before).WhichOneof("message") == "draining"
            assert next(later).WhichOneof("message") == "draining"
            for outbox in outboxes:
                outbox.put(None)
    finally:
        server.stop(grace_s=5)


def test_a_resumed_request_comes_back_as_it_was() -> None:
    past = (ResumedChoice((3, 2**31 - 1)), ResumedChoice(), ResumedChoice((4,), has_ended=True))
    request = Request(
        request_id=1,
        prompt_token_ids=[3],
        params=complete_params(n=3, seed=7),
        seed=7,
        resumed=past,
        was_accepted=True,
    )
    assert engine_codec.decode_request(engine_codec.encode_request(request)) == request


def test_output_that_is_cut_is_refused() -> None:
    params = complete_params(seed=7)
    request = Request(request_id=1, prompt_token_ids=[3], params=params, seed=7)
    message = engine_codec.encode_request(request)
    message.resumed.append(engine_pb2.ResumedChoice(token_ids=b"abc"))
    with pytest.raises(InvalidRequestError, match="resumed"):
        engine_codec.decode_request(message)


def test_the_fingerprint_reaches_frontends() -> None:
    model = make_model(fingerprint="0f" * 16)
    assert engine_codec.decode_info(engine_codec.encode_info(model)) == model
