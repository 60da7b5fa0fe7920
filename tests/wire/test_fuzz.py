"""Malformed messages at both public ports: refused, and nothing else happens."""

import asyncio
import contextlib
import gc
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import httpx2
import pytest

from protos.auth import bearer
from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.logs import is_wanted
from tests.frontend import API_KEY, TIMEOUT_S, Client, RunningFrontend
from tests.fuzzing import mutate_json
from tests.open_files import Open, look
from tests.openai import HERMES_TEMPLATE
from tests.scheduling import OracleExecutor
from tests.served import ScoringOracle, make_engine
from tests.spoiled_grpc import GENERATE, METHODS, REQUESTS, make_frames, spoil_grpc
from tests.spoiled_http import BODIES, FIELDS, MAX_BODY_BYTES, spoil_http
from tests.structured import RandomExecutor, make_compiler, write_tokenizer

pytestmark = pytest.mark.wire

NUM_BLOCKS = 64
READ_TIMEOUT_S = 0.3
# A client of raw bytes leaves when nothing has come for so long.
QUIET_S = 0.5
NUM_AT_ONCE = 32

AUTHORIZED = {"authorization": f"Bearer {API_KEY}"}
REFUSALS = frozenset(
    {
        *(grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED),
        *(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED),
    }
)


class FuzzedExecutor(RandomExecutor, ScoringOracle):
    """Obeys masks, and tells log probabilities."""


class Fuzzed(NamedTuple):
    engine: Engine
    executor: OracleExecutor
    frontend: RunningFrontend
    client: Client  # who stays: one that came and went would be looked at while it goes

    def check_unharmed(self, before: Open) -> None:
        """Good requests are answered, and nothing is left of the others."""
        call = self.client.generate(token_ids=[3], max_tokens=2, ignore_eos=True)
        assert sum(len(each.token_ids) for each in call) == 2
        while self.engine.stats().num_running or self.engine._live:
            self.client.call("GetModel")  # a round trip; the test's timeout bounds them
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        ends_at = time.monotonic() + TIMEOUT_S
        while more := self.open().more_than(before):
            assert time.monotonic() < ends_at, more
            self.client.call("GetModel")
        with http_client(self) as http:
            assert http.get("/ready").status_code == 200

    def num_objects(self) -> int:
        self.executor.plans.clear()  # for other tests it keeps all of them
        gc.collect()
        return len(gc.get_objects())

    def open(self) -> Open:
        addresses = (self.frontend.address, self.frontend.http_address)
        return look({int(address.rpartition(":")[2]) for address in addresses})


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder = write_tokenizer(tmp_path_factory.mktemp("model"))
    template = folder / "template.jinja"
    template.write_text(HERMES_TEMPLATE)
    compiler = make_compiler(folder)
    engine, executor = make_engine(
        FuzzedExecutor,
        path=str(folder),
        num_blocks=NUM_BLOCKS,
        prefix_cache=False,
        compiler=compiler,
        model={"fingerprint": "same"},
    )
    engine.start()
    server = EngineServer(engine, "engine-token")
    server.start()
    options: dict[str, Any] = {
        "chat_template": str(template),
        "max_n": 4,
        "max_body_bytes": MAX_BODY_BYTES,
        "read_timeout_s": READ_TIMEOUT_S,
    }
    with (
        RunningFrontend(server, **options) as frontend,
        grpc.insecure_channel(frontend.address) as channel,
    ):
        fuzzed = Fuzzed(engine, executor, frontend, Client(channel))
        warm(fuzzed)
        yield fuzzed
    server.stop(grace_s=5)
    engine.stop()
    compiler.close()


def warm(fuzzed: Fuzzed) -> None:
    """What is opened once, by the first request of a kind, is open."""
    with http_client(fuzzed) as client:
        for path, body in BODIES:
            response = client.post(path, json=body)
            assert response.status_code == (404 if path == "/v1/responses" else 200), response.text
    fuzzed.client.call("GetModel")
    with grpc.insecure_channel(fuzzed.frontend.address) as channel:
        for request in REQUESTS:
            code, details = ask(channel, GENERATE, request.SerializeToString())
            assert code is grpc.StatusCode.OK, details


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    told = filter(is_wanted, caplog.get_records("call"))
    assert [each for each in told if each.levelno >= logging.ERROR] == []


def http_client(fuzzed: Fuzzed) -> httpx2.Client:
    url = f"http://{fuzzed.frontend.http_address}"
    return httpx2.Client(base_url=url, timeout=TIMEOUT_S, headers=AUTHORIZED)


def ask(channel: grpc.Channel, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    call = channel.unary_stream(method)(message, metadata=bearer(API_KEY), timeout=TIMEOUT_S)
    with contextlib.suppress(grpc.RpcError):  # its code says what was wrong
        for _ in call:
            pass
    return call.code(), call.details()


def send_bodies(fuzzed: Fuzzed, draw: random.Random, count: int) -> Counter[int]:
    """JSON bodies; returns how many had which status."""
    statuses: Counter[int] = Counter()
    with http_client(fuzzed) as client:
        for _ in range(count):
            path, body = draw.choice(BODIES)
            content = mutate_json(draw, body, FIELDS[path])
            response = client.post(path, content=content)
            statuses[response.status_code] += 1
            what = (path, content[:2000], response.text[:2000])
            assert response.status_code < 500, what
            assert "server_error" not in response.text, what  # as the last event of a stream
            if response.status_code != 200:
                assert response.json()["error"]["message"], what
    return statuses


async def exchange(address: str, data: bytes, *, half_closes: bool) -> bytes:
    """What a server says to these bytes until it hangs up, or says nothing more."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = bytearray()
    with contextlib.suppress(OSError):  # the server needn't hear the rest, or say more
        writer.write(data)
        await writer.drain()
        if half_closes:
            writer.write_eof()
        while part := await asyncio.wait_for(reader.read(1 << 16), QUIET_S):
            received += part
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return bytes(received)


def exchange_all(address: str, draw: random.Random, messages: list[bytes]) -> list[bytes]:
    async def run() -> list[bytes]:
        slots = asyncio.Semaphore(NUM_AT_ONCE)

        async def one(data: bytes, half_closes: bool) -> bytes:
            async with slots:
                return await exchange(address, data, half_closes=half_closes)

        return await asyncio.gather(*(one(each, draw.random() < 0.5) for each in messages))

    return asyncio.run(run())


def send_http(fuzzed: Fuzzed, draw: random.Random, count: int) -> Counter[int]:
    """Bytes at the HTTP port; returns how many answers had which status."""
    messages = [spoil_http(draw) for _ in range(count)]
    answers = exchange_all(fuzzed.frontend.http_address, draw, messages)
    statuses: Counter[int] = Counter()
    for data, answer in zip(messages, answers, strict=True):
        found = [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
        assert all(status < 500 for status in found), (data[:2000], answer[:2000])
        assert b"server_error" not in answer, (data[:2000], answer[:2000])
        statuses.update(found)
    return statuses


def send_grpc(
    fuzzed: Fuzzed, draw: random.Random, count: int
) -> Counter[tuple[str, grpc.StatusCode]]:
    """Messages of calls; returns how many ended how."""
    codes: Counter[tuple[str, grpc.StatusCode]] = Counter()
    with grpc.insecure_channel(fuzzed.frontend.address) as channel:
        for _ in range(count):
            method, message = draw.choice(METHODS), spoil_grpc(draw)
            code, details = ask(channel, f"/lockstep.v1.{method}", message)
            assert code in REFUSALS, (method, message[:2000], code, details)
            assert code is grpc.StatusCode.OK or details, (method, message[:2000], code)
            codes[method, code] += 1
    return codes


def send_frames(fuzzed: Fuzzed, draw: random.Random, count: int) -> int:
    """Returns how many were answered by anything."""
    messages = [make_frames(draw) for _ in range(count)]
    return sum(map(bool, exchange_all(fuzzed.frontend.address, draw, messages)))


def fuzz_all(fuzzed: Fuzzed, draw: random.Random, scale: int) -> None:
    """About 20 messages for each 1 of `scale`, of all kinds."""
    before = fuzzed.open()
    statuses = send_bodies(fuzzed, draw, 7 * scale)
    fuzzed.check_unharmed(before)
    assert statuses[400] > scale
    assert statuses[200] > scale / 2
    assert send_http(fuzzed, draw, 5 * scale)[400] > scale
    fuzzed.check_unharmed(before)
    codes = send_grpc(fuzzed, draw, 6 * scale)
    fuzzed.check_unharmed(before)
    assert codes["Inference/Generate", grpc.StatusCode.INVALID_ARGUMENT] > scale
    assert codes["Inference/Nothing", grpc.StatusCode.UNIMPLEMENTED] > 0
    assert send_frames(fuzzed, draw, 2 * scale) > scale
    fuzzed.check_unharmed(before)


def test_every_address_that_takes_bodies_is_fuzzed(fuzzed: Fuzzed) -> None:
    with http_client(fuzzed) as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} <= FIELDS.keys()


def test_six_hundred_malformed_messages_do_no_harm(fuzzed: Fuzzed) -> None:
    fuzz_all(fuzzed, random.Random(1), 30)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_twenty_thousand_malformed_messages_do_no_harm(fuzzed: Fuzzed) -> None:
    draw = random.Random(2)
    fuzz_all(fuzzed, draw, 200)
    before = fuzzed.num_objects()
    fuzz_all(fuzzed, draw, 800)
    # Less than one for four messages, with what caplog keeps of gRPC's errors.
    assert fuzzed.num_objects() - before < 4000
