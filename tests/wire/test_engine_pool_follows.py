"""A pool whose engines come and go by what it is told."""

import asyncio
from collections.abc import Iterator

import pytest

from runtime.errors import UnavailableError
from runtime.frontend.engine_pool import EnginePool
from runtime.request import FinishReason, RequestOutput
from tests.fake_engines import Fakes, make_request
from tests.frontend import TIMEOUT_S

pytestmark = pytest.mark.wire


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    fakes = Fakes({}, {})
    yield fakes
    fakes.stop()


def test_a_pool_follows_the_addresses_it_is_told(fakes: Fakes) -> None:
    first, second = fakes.addresses

    async def main() -> None:
        pool = await EnginePool.connect([first], fakes.connect, resume_timeout_s=TIMEOUT_S)
        running = pool.generate(make_request())
        begun = asyncio.ensure_future(anext(running))
        connection, request = await fakes.next()
        pool.follow([second])
        assert pool.why_refused() is None  # by the first, until the second is there
        while second not in pool._clients:
            await asyncio.sleep(0)
        other = pool.generate(make_request())
        waiting = asyncio.ensure_future(anext(other))
        sent_to, _ = await fakes.next()
        assert sent_to is not connection
        # What the first runs comes from there all the same.
        connection.sink([RequestOutput(request.request_id, (7,), FinishReason.LENGTH)])
        assert (await begun).token_ids == (7,)
        fakes.stop_one(first)
        await fakes.clients[0].wait_ended()
        pool.follow([second])
        assert {*await pool.stats()} == {second}
        pool.follow([])
        assert pool.why_refused() is None
        waiting.cancel()
        await asyncio.wait([waiting])
        fakes.stop_one(second)
        await fakes.clients[1].wait_ended()
        with pytest.raises(UnavailableError, match="no engine can be reached at any address"):
            pool.generate(make_request())
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
