"""A frontend without ports: calls handed to it, an ASGI application, replicas that come and go."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import common_pb2, inference_pb2
from protos.auth import bearer
from runtime.errors import UnavailableError
from runtime.frontend.relayed_calls import CallFailedError
from runtime.frontend_config import FrontendConfig
from runtime.replicas import frontend as module
from runtime.replicas.frontend import ReplicaFrontend, replica_frontend
from runtime.request import FinishReason, RequestFailure, RequestOutput
from tests.fake_engines import TOKEN, Fakes
from tests.frontend import API_KEY, TIMEOUT_S

pytestmark = pytest.mark.wire

METADATA = bearer(API_KEY)


@pytest.fixture
def fakes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    monkeypatch.setattr(module, "FOLLOW_S", 0.01)
    fakes = Fakes({"path": str(folder)}, {"path": str(folder)})
    yield fakes
    fakes.stop()


class Replicas:
    """Those that the test says there are."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] | None = addresses

    async def find(self) -> Sequence[str] | None:
        return self.addresses


@asynccontextmanager
async def opened(replicas: Replicas, **options: Any) -> AsyncIterator[ReplicaFrontend]:
    config = FrontendConfig(api_key=API_KEY, resume_timeout_s=TIMEOUT_S, **options)
    async with (
        asyncio.timeout(TIMEOUT_S),
        replica_frontend(config, TOKEN, replicas.find) as frontend,
    ):
        yield frontend


def ask(token_ids: Sequence[int] = (10, 11, 12)) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids),
        sampling_params=common_pb2.SamplingParams(max_tokens=2),
    )


def output(request_id: int, token: int, *, is_last: bool) -> RequestOutput:
    return RequestOutput(request_id, (token,), FinishReason.LENGTH if is_last else None)


def test_a_request_goes_on_at_a_replica_that_comes(fakes: Fakes) -> None:
    first, second = fakes.addresses
    replicas = Replicas(first)

    async def main() -> None:
        async with opened(replicas) as frontend:
            stream = frontend.calls.generate(ask(), METADATA)
            begun = asyncio.ensure_future(anext(stream))
            connection, request = await fakes.next()
            connection.sink([output(request.request_id, 20, is_last=False)])
            assert list((await begun).token_ids) == [20]
            fakes.stop_one(first)
            replicas.addresses = [second]
            rest = asyncio.ensure_future(anext(stream))
            connection, request = await fakes.next()
            assert [each.token_ids for each in request.resumed] == [(20,)]
            connection.sink([output(request.request_id, 21, is_last=True)])
            assert list((await rest).token_ids) == [21]
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            frontend.check()

    asyncio.run(main())


def test_who_leaves_ends_the_request(fakes: Fakes) -> None:
    async def main() -> None:
        async with opened(Replicas(fakes.addresses[0])) as frontend:
            stream = frontend.calls.generate(ask(), METADATA)
            begun = asyncio.ensure_future(anext(stream))
            connection, request = await fakes.next()
            connection.sink([output(request.request_id, 20, is_last=False)])
            await begun
            await stream.aclose()
            aborted = await asyncio.to_thread(fakes.engines[0].aborted.get, timeout=TIMEOUT_S)
            assert aborted == request.request_id

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "metadata", "code"),
    [
        (ask(), (), grpc.StatusCode.UNAUTHENTICATED),
        (ask(), bearer("wrong"), grpc.StatusCode.UNAUTHENTICATED),
        (ask([10**6]), METADATA, grpc.StatusCode.INVALID_ARGUMENT),
        (ask([1] * 3000), METADATA, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_what_is_refused(
    fakes: Fakes,
    request_: inference_pb2.GenerateRequest,
    metadata: Sequence[tuple[str, str]],
    code: grpc.StatusCode,
) -> None:
    async def main() -> None:
        async with opened(Replicas(*fakes.addresses), max_body_bytes=2000) as frontend:
            with pytest.raises(CallFailedError) as raised:
                await anext(frontend.calls.generate(request_, metadata))
            assert raised.value.code == code
            calls = frontend.calls
            if code == grpc.StatusCode.UNAUTHENTICATED:
                with pytest.raises(CallFailedError):
                    await calls.answer(
                        calls.service.GetModel, inference_pb2.GetModelRequest(), metadata
                    )

    asyncio.run(main())


def test_what_an_engine_fails_is_told_after_what_it_brought(fakes: Fakes) -> None:
    async def main() -> None:
        async with opened(Replicas(fakes.addresses[0])) as frontend:
            stream = frontend.calls.generate(ask(), METADATA)
            begun = asyncio.ensure_future(anext(stream))
            connection, request = await fakes.next()
            connection.sink([output(request.request_id, 20, is_last=False)])
            await begun
            connection.sink([RequestFailure(request.request_id, UnavailableError("gone"))])
            with pytest.raises(CallFailedError, match="UNAVAILABLE: gone; every engine"):
                await anext(stream)

    asyncio.run(main())


async def get(frontend: ReplicaFrontend, path: str, key: str | None = None) -> tuple[int, str]:
    """Status and body of what the application answers."""
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
    }
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await frontend(scope, received.get, send)
    return sent[0]["status"], b"".join(each["body"] for each in sent[1:]).decode()


def test_http_with_a_key_and_without(fakes: Fakes) -> None:
    async def main() -> None:
        async with opened(Replicas(*fakes.addresses)) as frontend:
            assert (await get(frontend, "/ready"))[0] == 200
            assert (await get(frontend, "/v1/models"))[0] == 401
            status, body = await get(frontend, "/v1/models", API_KEY)
            assert status == 200
            assert json.loads(body)["data"][0]["id"] == "tiny"

    asyncio.run(main())


def test_a_server_begins_and_ends_it_as_any_application(fakes: Fakes) -> None:
    async def main() -> None:
        async with opened(Replicas(*fakes.addresses)) as frontend:
            received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            sent: list[str] = []

            async def send(message: Any) -> None:
                sent.append(message["type"])

            for each in ("lifespan.startup", "lifespan.shutdown"):
                received.put_nowait({"type": each})
            await frontend({"type": "lifespan"}, received.get, send)
            await frontend({"type": "websocket"}, received.get, send)
            assert sent == [
                "lifespan.startup.complete",
                "lifespan.shutdown.complete",
                "websocket.close",
            ]

    asyncio.run(main())


def test_without_replicas_nothing_is_taken_and_the_frontend_lives(fakes: Fakes) -> None:
    # One: a second may be on its way in while the first is lost, and would take the request.
    address = fakes.addresses[0]
    replicas = Replicas(address)

    async def main() -> None:
        async with opened(replicas) as frontend:
            replicas.addresses = None  # can't be told: those that were there are used
            assert (await get(frontend, "/ready"))[0] == 200
            replicas.addresses = []
            fakes.stop_one(address)
            while (await get(frontend, "/ready"))[0] == 200:
                await asyncio.sleep(0)
            with pytest.raises(CallFailedError, match="UNAVAILABLE"):
                await anext(frontend.calls.generate(ask(), METADATA))
            frontend.check()

    asyncio.run(main())
