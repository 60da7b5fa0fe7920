"""Requests that move: from an engine that ends, to one that counts what is new, with a past."""

import threading
from collections.abc import Callable, Iterator
from itertools import filterfalse, islice
from queue import SimpleQueue

import grpc
import pytest

from protos import engine_pb2, engine_pb2_grpc
from protos.auth import bearer
from runtime import engine_codec, structured
from runtime.engine_service import EngineServer
from runtime.errors import InvalidRequestError, WorkerError
from runtime.failure_codec import decode_failure, encode_failure
from runtime.grammar.compiler import GrammarCompiler
from runtime.request import Request, RequestFailure, ResumedChoice
from tests.params import complete_params
from tests.served import Served, UnhurriedOracle, make_engine
from tests.structured import (
    PROMPT,
    TIMEOUT_S,
    Client,
    HeldCompiler,
    Running,
    make_compiler,
    write_tokenizer,
)

pytestmark = pytest.mark.wire

TOKEN = "engine-token"


def test_a_request_that_comes_after_its_frontend_has_left_is_forgotten() -> None:
    served = Served()
    served.add(1, [1, 2])
    served.engine.abort_all(served.connection)
    served.add(2, [1, 2])
    assert not served.engine.has_work
    assert not served.failures


def test_an_engine_says_that_it_has_ended_before_its_requests_fail() -> None:
    engine, _ = make_engine(UnhurriedOracle, num_blocks=4000)
    engine.start()
    server = EngineServer(engine, TOKEN)
    server.start()
    outbox: SimpleQueue[engine_pb2.FrontendMessage | None] = SimpleQueue()

    def add(request_id: int) -> None:
        request = Request(
            request_id=request_id,
            prompt_token_ids=[3],
            params=complete_params(max_tokens=3000, ignore_eos=True, seed=1),
            seed=1,
        )
        outbox.put(engine_pb2.FrontendMessage(add=engine_codec.encode_request(request)))

    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            messages = engine_pb2_grpc.EngineStub(channel).Connect(
                iter(outbox.get, None), metadata=bearer(TOKEN), timeout=TIMEOUT_S
            )
            assert next(messages).HasField("info")
            add(1)
            assert next(messages).HasField("outputs")
            engine.fail(WorkerError("rank 1 died"))
            assert engine.wait(TIMEOUT_S) is not None
            add(2)
            told = [*islice(filterfalse(_brings_tokens, messages), 3)]
    finally:
        outbox.put(None)
        server.stop(grace_s=0)
        engine.stop()
    assert [each.WhichOneof("message") for each in told] == ["draining", "failed", "failed"]
    assert [each.failed.was_refused for each in told[1:]] == [False, True]


def _brings_tokens(message: engine_pb2.EngineMessage) -> bool:
    return bool(message.HasField("outputs"))


@pytest.mark.parametrize("was_refused", [True, False])
def test_a_failure_comes_back_as_it_was(was_refused: bool) -> None:
    failure = decode_failure(
        encode_failure(RequestFailure(7, InvalidRequestError("no"), was_refused))
    )
    assert (failure.request_id, str(failure.error)) == (7, "no")
    assert failure.was_refused == was_refused


def test_a_resumed_request_counts_once_and_with_what_is_new() -> None:
    options = {"n": 4, "max_tokens": 6, "ignore_eos": True}
    whole, rest = Served(), Served()
    whole.add(1, [1, 2, 3, 4, 5], **options)
    whole.drain()
    past = tuple(ResumedChoice(tuple(whole.tokens[1, choice][:3])) for choice in range(3))
    ended = ResumedChoice(tuple(whole.tokens[1, 3]), has_ended=True)
    rest.add(1, [1, 2, 3, 4, 5], **options, resumed=(*past, ended))
    rest.drain()
    for served, num_output_tokens in ((whole, 24), (rest, 9)):
        stats = served.engine.stats()
        for histogram in (stats.queue_s, stats.ttft_s, stats.e2e_s, stats.prompt_tokens):
            assert histogram.count == 1
        assert stats.num_prompt_tokens == 5
        assert stats.num_output_tokens == stats.output_tokens.sum == num_output_tokens


def test_a_resumed_request_has_ended_with_its_last_choice_whichever_that_is() -> None:
    served = Served()
    past = (ResumedChoice((5, 5, 5)), ResumedChoice((5,)))
    served.add(1, [1, 2], n=2, max_tokens=4, ignore_eos=True, resumed=past)
    while (1, 0) not in served.ends:
        served.engine.step()
    assert served.engine.stats().e2e_s.count == 0
    served.drain()
    assert served.engine.stats().e2e_s.count == 1


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(write_tokenizer(tmp_path_factory.mktemp("model")))
    yield compiler
    compiler.close()


class WatchedCompiler(HeldCompiler):
    """Notes on which threads calls were run."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        super().__init__(compiler)
        self.threads: list[str] = []

    def run(self, call: Callable[[], None]) -> None:
        def watched() -> None:
            self.threads.append(threading.current_thread().name)
            call()

        super().run(watched)


def resume(client: Client, request_id: int, *past: ResumedChoice, regex: str) -> None:
    request = Request(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        params=complete_params(max_tokens=160, n=len(past), regex=regex),
        seed=request_id,
        resumed=past,
        was_accepted=True,
    )
    client.connection.add(request)


def test_long_outputs_are_replayed_where_structures_are_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MAX_AT_ONCE", 4)
    regex = "[a-z]{12}-[0-9]{3}"
    with Running(compiler) as running:
        running.client.add(1, regex=regex)
        running.client.wait()
        wanted = running.client.tokens[1, 0]
    assert len(wanted) > 8
    for length in (4, 5, len(wanted) - 1):
        watched = WatchedCompiler(compiler)
        with Running(watched) as running:
            resume(running.client, 1, ResumedChoice(tuple(wanted[:length])), regex=regex)
            watched.release()
            running.client.wait()
            assert running.client.tokens[1, 0] == wanted[length:]
            assert running.engine._structured.num_compiling == 0
        assert watched.threads == (["grammar-compiler"] if length > 4 else [])


def test_a_long_output_that_is_not_of_its_structure_fails_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MAX_AT_ONCE", 1)
    with Running(compiler) as running:
        resume(running.client, 1, ResumedChoice((5, 5, 5)), ResumedChoice(), regex="[0-9]{3}")
        running.client.add(2, regex="[0-9]{3}")
        running.client.wait(2)
        assert str(running.client.failures[1]).startswith("resumed[0]: regex: after 0 tokens")
        assert running.client.text(2).isdigit()
        assert running.engine._structured.num_compiling == 0
        assert not running.engine._structured._matchers


def test_who_leaves_during_the_replay_is_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MAX_AT_ONCE", 1)
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    held = HeldCompiler(compiler)
    held.run = calls.put
    with Running(held) as running:
        resume(running.client, 1, ResumedChoice((5, 5, 5)), regex="[0-9]{3}")
        held.release()
        replay = calls.get(timeout=TIMEOUT_S)
        running.client.connection.abort(1)
        running.settle()
        replay()
        running.client.add(2, max_tokens=1)
        running.client.wait()
        assert not running.client.failures
        assert not running.engine._structured._matchers
        assert running.engine._structured.num_compiling == 0
