"""The engines of a frontend: which of them gets a request, and which goes on when one is lost.

Belongs to one event loop. Each address has a task that connects, waits for the end, and connects
again. What a request has got is kept here, so that another engine, or the same once it is back, can
go on with it: the reader sees a pause.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Self

from runtime.errors import LockstepError, UnavailableError
from runtime.frontend.engine_answers import gather_stats
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.generation import Generation
from runtime.frontend.routing import choose
from runtime.frontend_config import Routing
from runtime.request import EngineStats, ModelInfo, Request

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0

Connect = Callable[[str], Awaitable[EngineClient]]


class EnginePool:
    """Connected engines that give the same tokens. Made by `connect`, ended by `close`.

    `on_resumed` is called for each request that goes on elsewhere, `on_reconnected` for each engine
    that is back.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        resume_timeout_s: float,
        routing: Routing = "least_requests",
        on_resumed: Callable[[], object] = lambda: None,
        on_reconnected: Callable[[], object] = lambda: None,
    ) -> None:
        self.model: ModelInfo  # of the engine that was there first
        self.resume_timeout_s = resume_timeout_s
        self.on_resumed = on_resumed
        self.addresses: Sequence[str] = ()
        self._connect = connect
        self._routing = routing
        self._random = random.Random()
        self._on_reconnected = on_reconnected
        self._clients: dict[str, EngineClient] = {}  # by address
        self._others: dict[str, EngineClient] = {}  # with another model, by address
        self._known: set[str] = set()  # addresses where an engine was once
        self._errors: dict[str, LockstepError] = {}  # by address that was never reached
        self._changed = asyncio.Event()  # set, and made anew, whenever an engine comes or goes
        self._ended: asyncio.Future[UnavailableError] = asyncio.get_running_loop().create_future()
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by address

    @classmethod
    async def connect(
        cls,
        addresses: Sequence[str],
        connect: Connect,
        *,
        resume_timeout_s: float,
        routing: Routing = "least_requests",
        on_resumed: Callable[[], object] = lambda: None,
        on_reconnected: Callable[[], object] = lambda: None,
    ) -> Self:
        """Waits for the first engine; the others may come later.

        With `resume_timeout_s` of 0 the pool ends with the first engine that it loses.
        Raises UnavailableError: none can be reached.
        """
        pool = cls(
            connect,
            resume_timeout_s=resume_timeout_s,
            routing=routing,
            on_resumed=on_resumed,
            on_reconnected=on_reconnected,
        )
        pool.follow(addresses)
        try:
            while not pool._clients:
                if pool._ended.done():
                    raise pool._ended.result()
                await pool._changed.wait()
        except BaseException:
            await pool.close()
            raise
        return pool

    def follow(self, addresses: Sequence[str]) -> None:
        """Has the engines at these addresses from now on.

        Others get no more requests while there is one of these; what they run they may finish.
        """
        self.addresses = tuple(addresses)
        for address in addresses:
            if address not in self._keepers:
                keeper = asyncio.create_task(self._keep(address), name=f"engine {address}")
                keeper.add_done_callback(self._end_with)
                self._keepers[address] = keeper
        self._tell()

    def why_refused(self) -> str | None:
        """Why no request can be taken now."""
        return None if self._usable() else self._describe_absence()

    def why_not_ready(self) -> str | None:
        """Why a request couldn't run now, though it may be taken, and wait."""
        reasons = [each.why_not_ready for each in self._usable().values()]
        return self.why_refused() or (None if None in reasons else "; ".join(map(str, reasons)))

    async def wait_changed(self) -> None:
        """Until an engine comes, goes, or changes."""
        await self._changed.wait()

    def generate(self, request: Request, *, num_scored: int = 0) -> "Generation":
        """What the engines bring for a request, which one gets when that is first asked for.

        Without the first `num_scored` log probabilities of its prompt.
        Raises InvalidRequestError at once: the model can't serve it. Raises UnavailableError: there
        is no engine.
        """
        request.check(self.model)
        if (reason := self.why_refused()) is not None:
            raise UnavailableError(reason)
        return Generation(self, request, num_scored=num_scored)

    async def stats(self) -> dict[str, EngineStats]:
        """Of the engines that answer, by address. Raises UnavailableError: none does."""
        found = await gather_stats(dict(self._clients))
        if not found:
            raise UnavailableError(self._describe_absence())
        return found

    async def pick(
        self, request: Request, deadline: float | None, avoid: Collection[EngineClient] = ()
    ) -> EngineClient:
        """The engine that is to have `request`, one that has workers if any has.

        Waits for one until `deadline`, None: doesn't wait.

        Raises UnavailableError: there is none, or only such as are to be avoided.
        """
        while True:
            usable = self._usable()
            wanted = {key: each for key, each in usable.items() if each not in avoid}
            if wanted:
                ready = {key: each for key, each in wanted.items() if each.why_not_ready is None}
                loads = {key: each.num_requests for key, each in (ready or wanted).items()}
                return wanted[choose(self._routing, loads, request, self._random)]
            if usable:
                raise UnavailableError("every engine that is there has failed the request")
            if deadline is None or self._ended.done():
                raise UnavailableError(self._describe_absence())
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError as error:
                raise UnavailableError(
                    f"{self._describe_absence()}, for resume_timeout_s={self.resume_timeout_s:g}"
                ) from error

    async def wait_ended(self) -> UnavailableError:
        """Waits until no engine can be used any more, whatever comes; returns why."""
        return await asyncio.shield(self._ended)

    async def close(self, reason: str = "the frontend is stopping") -> None:
        """Fails what runs with `reason` and leaves the engines. May be called twice."""
        self._end(UnavailableError(reason))
        for task in self._keepers.values():
            task.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        clients = [*self._clients.values(), *self._others.values()]
        self._clients.clear()
        self._others.clear()
        for client in clients:
            await client.close(reason)

    def _usable(self) -> dict[str, EngineClient]:
        """Those that take requests, by address."""
        usable = {key: each for key, each in self._clients.items() if each.is_usable}
        # Of the others, who is to go may be here still before who is to come.
        return {key: each for key, each in usable.items() if key in self.addresses} or usable

    async def _keep(self, address: str) -> None:
        """Connects to one address again and again, while it is one of the pool's."""
        backoff_s = MIN_BACKOFF_S
        while address in self.addresses:
            try:
                client = await self._connect(address)
            except LockstepError as error:
                self._note_error(address, error)
            else:
                backoff_s = MIN_BACKOFF_S
                self._take(address, client)
                failure = await client.wait_ended()
                self._lose(address, failure)
                await client.close()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        self._errors.pop(address, None)
        del self._keepers[address]

    def _note_error(self, address: str, error: LockstepError) -> None:
        logger.info("%s", error)
        if address not in self._known:
            self._errors[address] = error
        if not self._known and self._errors.keys() >= {*self.addresses}:
            self._end(UnavailableError("; ".join(map(str, self._errors.values()))))

    def _take(self, address: str, client: EngineClient) -> None:
        """Uses an engine that has connected, unless it has another model."""
        if not self._known:
            self.model = client.model
        if (reason := self._why_other(client.model)) is not None:
            self._refuse(address, client, reason)
            return
        if address in self._known:
            self._on_reconnected()
            logger.warning("the engine at %s is back", address)
        self._known.add(address)
        self._errors.pop(address, None)
        self._clients[address] = client
        client.on_readiness = self._tell
        self._tell()

    def _why_other(self, model: ModelInfo) -> str | None:
        """Why an engine can't go on with what another has begun."""
        own = self.model
        if model.fingerprint != own.fingerprint:
            return (
                f"has another model ({model.name}, fingerprint {model.fingerprint}) than this "
                f"frontend ({own.name}, {own.fingerprint})"
            )
        # One that takes less would refuse in the middle what was let in by the others' measure.
        if model.max_model_len != own.max_model_len:
            return (
                f"has max_model_len={model.max_model_len}, and this frontend "
                f"{own.max_model_len}: give all engines the same --max-model-len"
            )
        return None

    def _refuse(self, address: str, client: EngineClient, reason: str) -> None:
        self._others[address] = client
        logger.error("the engine at %s %s: it gets no requests", address, reason)
        if self._others.keys() >= {*self.addresses}:
            self._end(
                UnavailableError(
                    "all engines have another model or max_model_len now: start the frontend again"
                )
            )

    def _lose(self, address: str, failure: UnavailableError) -> None:
        self._clients.pop(address, None)
        self._others.pop(address, None)
        if self.resume_timeout_s == 0:
            self._end(failure)
        logger.warning("the engine at %s is lost: %s", address, failure)
        self._tell()

    def _end_with(self, keeper: asyncio.Task[None]) -> None:
        """A keeper has ended, and not for want of its address: that is a bug of ours."""
        if keeper.cancelled() or keeper.exception() is None:
            return
        error = keeper.exception()
        logger.error("%s can't be kept", keeper.get_name(), exc_info=error)
        self._end(UnavailableError(f"{keeper.get_name()} can't be kept: {error!r}"))

    def _end(self, error: UnavailableError) -> None:
        if not self._ended.done():
            self._ended.set_result(error)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _describe_absence(self) -> str:
        if self._ended.done():
            return str(self._ended.result())
        if self._clients:
            return "the engine is draining and takes no more requests"
        return f"no engine can be reached at {', '.join(self.addresses) or 'any address'}"
