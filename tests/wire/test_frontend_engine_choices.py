"""Choices of requests at the frontend's end of the engine's stream: in order, and ended alone."""

import asyncio
from contextlib import aclosing

import pytest

from runtime.engine_service import EngineServer
from runtime.errors import ModelOutputError
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.inbox import MAX_JOINED_LOGPROBS, Inbox
from runtime.request import FinishReason, RequestFailure, RequestOutput, TokenLogprobs
from tests.frontend import TIMEOUT_S, FakeEngine, added, ask
from tests.params import complete_params

pytestmark = pytest.mark.wire

TOKEN = "engine-token"


@pytest.fixture
def address(server: EngineServer) -> str:
    return f"127.0.0.1:{server.port}"


def test_choices_that_came_meanwhile_are_one_each_in_the_order_of_their_first(
    engine: FakeEngine, address: str
) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        outputs = ask(client, [3], complete_params(max_tokens=8, n=3), seed=1)
        first = asyncio.ensure_future(anext(outputs))
        connection, request_id = await added(engine)

        def output(token: int, index: int, reason: FinishReason | None = None) -> RequestOutput:
            return RequestOutput(request_id, (token,), reason, index, num_cached_tokens=16)

        connection.sink([output(5, 1)])
        assert await first == output(5, 1)
        connection.sink([output(6, 2), output(7, 0), output(8, 1)])
        connection.sink([output(9, 0, FinishReason.STOP), output(10, 2)])
        connection.sink([output(11, 1, FinishReason.LENGTH), output(12, 2, FinishReason.STOP)])
        await client.stats()  # comes after them on the stream
        assert [each async for each in outputs] == [
            RequestOutput(request_id, (6, 10, 12), FinishReason.STOP, 2, 16),
            RequestOutput(request_id, (7, 9), FinishReason.STOP, 0, 16),
            RequestOutput(request_id, (8, 11), FinishReason.LENGTH, 1, 16),
        ]
        await client.close()
        assert engine.aborted.empty()

    asyncio.run(main())


def test_a_request_with_one_choice_left_is_aborted_as_a_whole(
    engine: FakeEngine, address: str
) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        params = complete_params(max_tokens=8, n=2)
        async with aclosing(ask(client, [3], params, seed=1)) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            connection, request_id = await added(engine)
            connection.sink([RequestOutput(request_id, (5,), FinishReason.STOP, 1)])
            await first
        assert await asyncio.to_thread(engine.aborted.get, timeout=TIMEOUT_S) == request_id
        connection.sink([RequestOutput(request_id, (6,), FinishReason.STOP, 0)])  # was under way
        await client.stats()
        await client.close()
        assert engine.aborted.empty()

    asyncio.run(main())


def test_logprobs_and_scores_that_came_meanwhile_stay_in_order(
    engine: FakeEngine, address: str
) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        params = complete_params(max_tokens=8, logprobs=0, prompt_logprobs=0)
        outputs = ask(client, [3, 4, 5, 6], params, seed=1)
        first = asyncio.ensure_future(anext(outputs))
        connection, request_id = await added(engine)
        entries = [TokenLogprobs(-float(place), (place,), (-0.5,)) for place in range(6)]

        def output(scores: list[TokenLogprobs], *tokens: int) -> RequestOutput:
            logprobs = tuple(entries[token] for token in tokens)
            return RequestOutput(request_id, tokens, logprobs=logprobs, scores=tuple(scores))

        connection.sink([output(entries[:1])])
        assert await first == output(entries[:1])
        connection.sink([output(entries[1:2])])
        connection.sink([output(entries[2:3], 3)])
        connection.sink([output([], 4, 5)])
        await client.stats()  # comes after them on the stream
        assert await anext(outputs) == output(entries[1:3], 3, 4, 5)
        await outputs.aclose()
        await client.close()

    asyncio.run(main())


def test_what_comes_for_a_choice_that_was_ended_is_dropped(
    engine: FakeEngine, address: str
) -> None:
    """Its own end too, which crossed with the abort; the other choice goes on to the last."""

    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        outputs = ask(client, [3], complete_params(max_tokens=8, n=2), seed=1)
        first = asyncio.ensure_future(anext(outputs))
        connection, request_id = await added(engine)
        connection.sink([RequestOutput(request_id, (5,), None, 1)])
        assert (await first).choice == 1
        connection.sink([RequestOutput(request_id, (6,), None, 1)])
        await client.stats()  # comes after it on the stream
        outputs.end(1)
        assert await asyncio.to_thread(engine.aborted.get, timeout=TIMEOUT_S) == (request_id, 1)
        connection.sink([RequestOutput(request_id, (7,), FinishReason.LENGTH, 1)])
        connection.sink([RequestOutput(request_id, (8,), None, 0)])
        assert await anext(outputs) == RequestOutput(request_id, (8,), None, 0)
        outputs.end(0)
        assert await asyncio.to_thread(engine.aborted.get, timeout=TIMEOUT_S) == (request_id, 0)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
        connection.sink([RequestOutput(request_id, (9,), FinishReason.STOP, 0)])
        await client.stats()
        await client.close()
        assert engine.aborted.empty()

    asyncio.run(main())


def test_a_failure_after_a_choice_was_ended_is_told(engine: FakeEngine, address: str) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        outputs = ask(client, [3], complete_params(max_tokens=8, n=2), seed=1)
        first = asyncio.ensure_future(anext(outputs))
        connection, request_id = await added(engine)
        connection.sink([RequestOutput(request_id, (5,), None, 0)])
        await first
        outputs.end(0)
        connection.sink([RequestFailure(request_id, ModelOutputError("NaN"))])
        with pytest.raises(ModelOutputError, match="NaN"):
            await anext(outputs)
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("indices", [(2,), (-1,), (0, 0)])
def test_a_choice_that_is_none_ends_the_connection(
    engine: FakeEngine, address: str, indices: tuple[int, ...]
) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        outputs = ask(client, [3], complete_params(max_tokens=8, n=2), seed=1)
        pending = asyncio.ensure_future(anext(outputs))
        connection, request_id = await added(engine)
        connection.sink(
            [RequestOutput(request_id, (5,), FinishReason.STOP, index) for index in indices]
        )
        failure = str(await client.wait_ended())
        assert f"index={indices[-1]} must be one of 2 choices that haven't ended" in failure
        await asyncio.wait([pending])
        pending.exception()
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["logprobs", "scores"])
@pytest.mark.parametrize("num_each", [1, 100, 2000])
def test_many_logprobs_that_wait_are_given_in_parts(kind: str, num_each: int) -> None:
    """As one message they would be more than clients of gRPC take."""

    async def main() -> None:
        inbox = Inbox(2)
        entries = [TokenLogprobs(-float(place), (), ()) for place in range(5000)]
        outputs = [
            RequestOutput(1, (start,), **{kind: tuple(entries[start : start + num_each])})
            for start in range(0, 5000, num_each)
        ]
        for output in outputs:
            inbox.put(output)
        inbox.put(RequestOutput(1, (9,), FinishReason.LENGTH, 1))
        taken = [await inbox.take() for _ in range(2)]
        assert taken.pop().choice == 1, "the other choice needn't wait for all of it"
        while sum(len(getattr(each, kind)) for each in taken) < 5000:
            taken.append(await inbox.take())
        assert [entry for each in taken for entry in getattr(each, kind)] == entries
        assert [token for each in taken for token in each.token_ids] == [
            token for each in outputs for token in each.token_ids
        ]
        sizes = [len(getattr(each, kind)) for each in taken]
        assert max(sizes) <= max(MAX_JOINED_LOGPROBS, num_each)
        assert len(sizes) == {1: 5, 100: 5, 2000: 3}[num_each]

    asyncio.run(main())


def test_what_is_left_of_a_choice_that_was_ended_is_dropped() -> None:
    async def main() -> None:
        inbox = Inbox(1)
        entries = (TokenLogprobs(-1.0, (), ()),) * MAX_JOINED_LOGPROBS
        for token in (1, 2):
            inbox.put(RequestOutput(1, (token,), logprobs=entries))
        assert (await inbox.take()).token_ids == (1,)
        inbox.end(0)
        assert await inbox.take() is None

    asyncio.run(main())
