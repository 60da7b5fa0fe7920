"""Engines that die slowly, hang or differ, and what that costs those that are well."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from runtime.engine_service import EngineServer
from runtime.errors import UnavailableError, WorkerError
from runtime.frontend import engine_answers
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.engine_pool import EnginePool
from runtime.request import (
    EngineStats,
    FinishReason,
    RequestFailure,
    RequestOutput,
    ResumedChoice,
    TokenLogprobs,
)
from tests.engine_stats import make_stats
from tests.fake_engines import Fakes, make_request
from tests.frontend import (
    TIMEOUT_S,
    Client,
    RunningFrontend,
)
from tests.served import UnhurriedOracle, make_engine, write_characters

pytestmark = pytest.mark.wire

TOKEN = "engine-token"
LOST = UnavailableError("the ranks are gone")


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    fakes = Fakes({}, {})
    yield fakes
    fakes.stop()


def test_one_that_has_lost_its_workers_gets_nothing_back(tmp_path: Path) -> None:
    """Its streams stay open for a moment, so that frontends hear of its end."""
    folder = write_characters(tmp_path / "model")
    options: dict[str, Any] = {
        "path": str(folder),
        "num_blocks": 4000,
        "model": {"fingerprint": "same"},
    }
    with ExitStack() as stack:
        engines, servers = [], []
        for _ in range(2):
            engine, _ = make_engine(UnhurriedOracle, **options)
            stack.callback(engine.stop)
            engine.start()
            server = EngineServer(engine, TOKEN)
            stack.callback(server.stop, 0)
            server.start()
            engines.append(engine)
            servers.append(server)
        frontend = stack.enter_context(RunningFrontend(*servers, resume_timeout_s=TIMEOUT_S))
        client = Client(stack.enter_context(grpc.insecure_channel(frontend.address)))
        calls = [
            client.generate(token_ids=[3, each + 4], max_tokens=60, ignore_eos=True)
            for each in range(12)
        ]
        counts = [len(next(call).token_ids) for call in calls]
        engines[0].fail(WorkerError("rank 1 died"))
        for place, call in enumerate(calls):
            counts[place] += sum(len(each.token_ids) for each in call)
        assert counts == [60] * 12
        list(client.generate(token_ids=[3], max_tokens=2))


def test_one_that_fails_a_request_does_not_get_it_again(fakes: Fakes) -> None:
    async def main() -> None:
        async with fakes.pool() as pool:
            outputs = pool.generate(make_request())
            first = asyncio.ensure_future(anext(outputs))
            failed = []
            for _ in fakes.engines:
                connection, request = await fakes.next()
                failed.append(connection._engine)
                connection.sink([RequestFailure(request.request_id, LOST)])
            assert failed[0] is not failed[1]
            with pytest.raises(UnavailableError) as raised:
                await first
            assert str(raised.value) == (
                "the ranks are gone; every engine that is there has failed the request"
            )

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_after_a_token_each_may_have_it_again(fakes: Fakes) -> None:
    async def main() -> None:
        async with fakes.pool() as pool:
            outputs = pool.generate(make_request())
            for token in range(4):
                step = asyncio.ensure_future(anext(outputs))
                connection, request = await fakes.next()
                assert request.resumed == ((ResumedChoice((*range(token),)),) if token else ())
                assert request.was_accepted == bool(token)
                reason = FinishReason.LENGTH if token == 3 else None
                connection.sink([RequestOutput(request.request_id, (token,), reason)])
                if reason is None:
                    connection.sink([RequestFailure(request.request_id, LOST)])
                assert (await step).token_ids == (token,)

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


@pytest.mark.parametrize("was_refused", [True, False])
def test_what_was_refused_goes_elsewhere_as_it_is(fakes: Fakes, was_refused: bool) -> None:
    async def main() -> None:
        async with fakes.pool() as pool:
            first = asyncio.ensure_future(anext(pool.generate(make_request())))
            connection, request = await fakes.next()
            assert not request.was_accepted
            connection.sink([RequestFailure(request.request_id, LOST, was_refused)])
            _, request = await fakes.next()
            assert request.was_accepted != was_refused
            assert request.resumed == (() if was_refused else (ResumedChoice(),))
            first.cancel()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


@pytest.mark.parametrize("num_scored", [0, 2])
def test_scores_of_a_prompt_come_once_whoever_gives_them(fakes: Fakes, num_scored: int) -> None:
    scores = [TokenLogprobs(-float(place), (), ()) for place in range(1, 10)]

    async def main() -> None:
        async with fakes.pool() as pool:
            outputs = pool.generate(make_request(prompt_logprobs=0), num_scored=num_scored)
            found: list[TokenLogprobs] = []

            async def read() -> None:
                async for output in outputs:
                    assert output.scores or output.token_ids
                    found.extend(output.scores)

            reading = asyncio.create_task(read())
            # Those that are draining when they are lost had the request all the same.
            for count in (5, 3):
                connection, request = await fakes.next()
                told = RequestOutput(request.request_id, (), scores=tuple(scores[:count]))
                connection._engine.tell_draining()
                connection.sink([told, RequestFailure(request.request_id, LOST)])
                for client in fakes.clients:
                    await client.stats()
                    client.is_draining = False
            connection, request = await fakes.next()
            for token, part in (((), scores[:4]), ((7,), scores[4:])):
                reason = FinishReason.LENGTH if token else None
                told = RequestOutput(request.request_id, token, reason, scores=tuple(part))
                connection.sink([told])
            await reading
            assert found == scores[num_scored:]

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_one_that_hangs_does_not_hide_the_others(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_answers, "STATS_TIMEOUT_S", 0.3)
    released = threading.Event()
    num_asked = 0

    def stats_later() -> EngineStats:
        nonlocal num_asked
        num_asked += 1
        assert released.wait(TIMEOUT_S)
        return make_stats()

    async def main() -> None:
        async with fakes.pool() as pool:
            assert {*await pool.stats()} == {*fakes.addresses}
            fakes.engines[1].stats = stats_later
            for _ in range(3):
                assert [*await pool.stats()] == fakes.addresses[:1]
            assert num_asked == 1
            released.set()
            while {*await pool.stats()} != {*fakes.addresses}:
                pass

    try:
        asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    finally:
        released.set()
    assert f"the engine at {fakes.addresses[1]} hasn't answered within 0.3 s" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "other"}, "has another model (tiny, fingerprint "),
        ({"max_model_len": 4000}, "give all engines the same --max-model-len: it gets no requests"),
    ],
)
def test_one_that_differs_gets_nothing_and_is_left_in_the_end(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = Fakes({}, changes)

    async def main() -> None:
        async with fakes.pool() as pool:
            assert len(pool._clients) == len(pool._others) == 1
            for _ in range(3):
                first = asyncio.ensure_future(anext(pool.generate(make_request())))
                connection, _ = await fakes.next()
                assert connection._engine.model == pool.model
                first.cancel()
        for client in fakes.clients:
            assert str(await client.wait_ended()) == "the frontend is stopping"

    try:
        asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    finally:
        fakes.stop()
    assert reason in caplog.text


def test_what_nobody_expected_ends_the_pool_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def connect(address: str) -> EngineClient:
        return await EngineClient.connect(address, "no\ntoken")

    async def main() -> None:
        await EnginePool.connect(["127.0.0.1:1"], connect, resume_timeout_s=1.0)

    with pytest.raises(UnavailableError, match=r"engine 127.0.0.1:1 can't be kept: ValueError"):
        asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert [each.levelno for each in caplog.records] == [logging.ERROR]
