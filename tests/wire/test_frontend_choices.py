"""Requests of several choices, and what goes along with a request to the engine."""

from pathlib import Path

import grpc
import pytest

from protos import common_pb2, inference_pb2
from runtime.engine_service import EngineServer
from runtime.errors import CapacityError
from runtime.frontend.text import REPLACEMENT
from runtime.request import FinishReason, Request, RequestFailure, RequestOutput
from runtime.sampling_params import fork_seed
from tests.frontend import (
    LINES,
    TIMEOUT_S,
    Client,
    EchoEngine,
    FakeConnection,
    FakeEngine,
    RunningFrontend,
    make_byte_fallback_tokenizer,
    make_model,
    status_of,
)

pytestmark = pytest.mark.wire

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH


def byte_tokens(text: str) -> list[int]:
    """A token for each byte of the text."""
    tokenizer = make_byte_fallback_tokenizer(LINES)
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def sink(
    connection: FakeConnection,
    request_id: int,
    *steps: tuple[int, int, FinishReason | None],
) -> None:
    """One step: (index, token, finish reason) of each choice that got something."""
    connection.sink(
        [RequestOutput(request_id, (token,), reason, index, 16) for index, token, reason in steps]
    )


def reached(engine: FakeEngine, call: grpc.Call) -> Request:
    """What the engine is asked for by `call`, which would be cancelled if nobody held it."""
    _, request = engine.added.get(timeout=TIMEOUT_S)
    call.cancel()
    return request


def test_each_choice_has_its_text_its_seed_and_its_end(engine: FakeEngine, client: Client) -> None:
    call = client.generate("two", n=3, seed=77, max_tokens=9)
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    assert (request.params.n, request.seed) == (3, 77)
    thai, arabic = byte_tokens("ก"), byte_tokens("م")
    # Characters of two choices come byte by byte, in turn: one detokenizer would read neither.
    sink(connection, request.request_id, (0, thai[0], None), (1, arabic[0], None))
    sink(connection, request.request_id, (1, arabic[1], LENGTH), (0, thai[1], None))
    sink(connection, request.request_id, (2, thai[0], LENGTH), (0, thai[2], LENGTH))
    responses = list(call)
    by_choice = [[each for each in responses if each.index == index] for index in range(3)]
    assert ["".join(each.text for each in choice) for choice in by_choice] == [
        "ก",
        "م",
        REPLACEMENT,
    ]
    tokens = [[token for each in choice for token in each.token_ids] for choice in by_choice]
    assert tokens == [thai, arabic, thai[:1]]
    for index, choice in enumerate(by_choice):
        assert [each.seed for each in choice if each.HasField("seed")] == [fork_seed(77, index)]
        assert choice[0].HasField("seed")
        assert [bool(each.finish_reason) for each in choice][:-1] == [False] * (len(choice) - 1)
    assert [choice[-1].finish_reason for choice in by_choice] == [LENGTH, LENGTH, LENGTH]


def test_usage_is_told_once_for_all_choices(engine: FakeEngine, client: Client) -> None:
    call = client.generate(token_ids=[5] * 20, n=2)
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    sink(connection, request.request_id, (0, 7, None), (1, 8, STOP))
    sink(connection, request.request_id, (0, 9, STOP))
    *earlier, last = list(call)
    assert last.usage == inference_pb2.Usage(
        num_prompt_tokens=20, num_output_tokens=3, num_cached_tokens=16
    )
    assert not any(each.HasField("usage") for each in earlier)


def test_concurrent_requests_of_many_choices_stay_apart(folder: Path) -> None:
    engine = EchoEngine(make_model(str(folder)))
    server = EngineServer(engine, "engine-token")
    server.start()
    with RunningFrontend(server) as frontend, grpc.insecure_channel(frontend.address) as channel:
        client = Client(channel)
        engine.answer(num_requests=4)
        prompts = [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14]]
        calls = [client.generate(token_ids=prompt, n=128) for prompt in prompts]
        for prompt, call in zip(prompts, calls, strict=True):
            tokens: list[list[int]] = [[] for _ in range(128)]
            for response in call:
                tokens[response.index].extend(response.token_ids)
            assert tokens == [prompt] * 128
            assert response.usage.num_output_tokens == 128 * len(prompt)
    server.stop(grace_s=5)


def test_a_failure_ends_all_choices(engine: FakeEngine, client: Client) -> None:
    call = client.generate("two", n=2)
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    sink(connection, request.request_id, (1, 7, STOP))
    full = CapacityError("the queue is full", retry_after_s=0.25)
    connection.sink([RequestFailure(request.request_id, full)])
    assert next(call).finish_reason == common_pb2.FINISH_REASON_STOP
    assert status_of(call) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


def test_a_client_that_leaves_takes_all_choices_along(engine: FakeEngine, client: Client) -> None:
    call = client.generate("two", n=3)
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    sink(connection, request.request_id, (0, 7, STOP), (1, 8, None))
    next(call)
    call.cancel()
    assert engine.aborted.get(timeout=TIMEOUT_S) == request.request_id
    sink(connection, request.request_id, (1, 8, None), (2, 9, None))  # was under way
    client.call("GetStats")  # answered after everything that went before it on the stream
    assert engine.aborted.empty()


def test_a_full_queue_tells_when_to_try_again(engine: FakeEngine, client: Client) -> None:
    call = client.generate("two")
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    full = CapacityError("max_queued_requests=1 wait already", retry_after_s=1.2345)
    connection.sink([RequestFailure(request.request_id, full)])
    assert status_of(call) == (grpc.StatusCode.RESOURCE_EXHAUSTED, str(full))
    assert ("grpc-retry-pushback-ms", "1235") in call.trailing_metadata()


def test_other_failures_name_no_time(engine: FakeEngine, client: Client) -> None:
    call = client.generate("two", n=0)
    assert status_of(call)[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert "grpc-retry-pushback-ms" not in dict(call.trailing_metadata())


@pytest.mark.parametrize("priority", [-10, 0, 10])
def test_salt_and_priority_reach_the_engine(
    engine: FakeEngine, client: Client, priority: int
) -> None:
    salt = "ก" * 85 + "x"  # 256 bytes
    call = client.generate("two", cache_salt=salt, priority=priority, min_tokens=3)
    request = reached(engine, call)
    assert (request.cache_salt, request.priority, request.params.min_tokens) == (salt, priority, 3)


def test_the_clients_deadline_reaches_the_engine(engine: FakeEngine, client: Client) -> None:
    assert (
        0 < reached(engine, client.generate("two", timeout_s=20.0)).timeout_s <= 21.0
    )  # gRPC rounds up
    assert reached(engine, client.generate("two", timeout_s=None)).timeout_s is None


def test_the_tenant_is_that_of_the_key(
    server: EngineServer, engine: FakeEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('acme = "key-a"\n"Übung & Söhne" = "key-b"\n')
    with (
        RunningFrontend(server, api_keys=str(keys)) as frontend,
        grpc.insecure_channel(frontend.address) as channel,
    ):
        for key, tenant in [
            ("api-key", "default"),
            ("key-a", "acme"),
            ("key-b", "Übung & Söhne"),
        ]:
            call = Client(channel, key).generate("two", metadata=(("tenant", "acme"),))
            assert reached(engine, call).tenant == tenant
        for key in ("key-c", "key-", "acme"):
            code, _ = status_of(Client(channel, key).generate("two"))
            assert code == grpc.StatusCode.UNAUTHENTICATED


def test_a_file_of_keys_does_without_another(
    server: EngineServer, engine: FakeEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('acme = "key-a"\n')
    with (
        RunningFrontend(server, api_key=None, api_keys=str(keys)) as frontend,
        grpc.insecure_channel(frontend.address) as channel,
    ):
        assert reached(engine, Client(channel, "key-a").generate("two")).tenant == "acme"
        assert status_of(Client(channel).generate("two"))[0] == grpc.StatusCode.UNAUTHENTICATED
