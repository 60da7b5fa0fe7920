"""One request over the engines that it is given to, one after another."""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol, Self

from runtime.errors import UnavailableError
from runtime.frontend.engine_client import EngineClient, Session
from runtime.request import Request, RequestOutput, ResumedChoice

# A request that has brought so many engines down without a token in between gets no other.
MAX_FRUITLESS = 3


class Pool(Protocol):
    """Where engines come from; see `engine_pool.EnginePool`."""

    resume_timeout_s: float
    on_resumed: Callable[[], object]

    async def pick(
        self, request: Request, deadline: float | None, avoid: Collection[EngineClient] = ()
    ) -> EngineClient: ...


class Generation:
    """New tokens of each choice as they come, and its finish reason with the last of them.

    Steps of a choice that came while the consumer was busy are joined. Closing it, or
    cancelling its consumer, aborts the request with all its choices.

    Iterating raises UnavailableError: no engine is there to begin or to go on; CapacityError and
    DeadlineError: the engine has no room, or no time; InvalidRequestError and ModelOutputError:
    there is nothing to sample.
    """

    def __init__(self, pool: Pool, request: Request, *, num_scored: int = 0) -> None:
        """The reader has got `num_scored` log probabilities of the prompt."""
        self._pool = pool
        self._request = request
        past = request.resumed or (ResumedChoice(),) * request.params.n
        self._token_ids = [list(each.token_ids) for each in past]
        self._ended = {index for index, each in enumerate(past) if each.has_ended}
        self._num_scores = num_scored  # of the prompt, that the reader has got
        self._num_scores_again = self._num_scores_of_engine()
        self._deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        self._num_fruitless = 0  # engines lost since the last output
        self._failed: set[EngineClient] = set()  # that can't have it again before its next output
        self._client: EngineClient | None = None
        self._session: Session | None = None
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_closed:
            raise StopAsyncIteration
        try:
            while True:
                try:
                    output = await self._next()
                except UnavailableError as error:
                    await self._move(error)
                    continue
                if output is not None:
                    return output
        except BaseException:
            await self.aclose()
            raise

    def end(self, choice: int) -> None:
        """The client has all that it wants of a choice, of which nothing more comes."""
        self._ended.add(choice)
        if self._session is not None:
            self._session.end(choice)

    async def aclose(self) -> None:
        """May be called twice."""
        self._is_closed = True
        if self._session is not None:
            await self._session.aclose()

    async def _next(self) -> RequestOutput | None:
        """None where all of an output came before."""
        if self._session is None:
            self._client = await self._pool.pick(self._request, None)
            self._session = self._client.generate(self._request)
        output = await anext(self._session)
        self._num_fruitless = 0
        self._failed.clear()
        self._token_ids[output.choice] += output.token_ids
        if output.finish_reason is not None:
            self._ended.add(output.choice)
        again = min(self._num_scores_again, len(output.scores))
        self._num_scores_again -= again
        output = output._replace(scores=output.scores[again:])
        self._num_scores += len(output.scores)
        if again and not (output.scores or output.token_ids or output.finish_reason):
            return None
        return output

    async def _move(self, error: UnavailableError) -> None:
        """Goes on with another engine, or with the same once it is back.

        Raises UnavailableError: none comes in time, or it makes no sense to try more.
        """
        client, session = self._client, self._session
        if client is None or session is None or self._pool.resume_timeout_s == 0:
            raise error
        if len(self._ended) == self._request.params.n:
            raise StopAsyncIteration
        await session.aclose()
        self._failed.add(client)
        if not session.was_refused:
            self._num_fruitless += 1
            if self._num_fruitless > MAX_FRUITLESS:
                raise UnavailableError(
                    f"{error}; the request was given to {MAX_FRUITLESS} engines, and none gave a "
                    "token before it was lost"
                ) from error
        deadline = asyncio.get_running_loop().time() + self._pool.resume_timeout_s
        try:
            self._client = await self._pool.pick(self._request, deadline, self._failed)
        except UnavailableError as absence:
            raise UnavailableError(f"{error}; {absence}") from error
        if not session.was_refused:
            self._request = self._resumed()
            self._num_scores_again = self._num_scores_of_engine()
            self._pool.on_resumed()
        self._session = self._client.generate(self._request)

    def _num_scores_of_engine(self) -> int:
        """How many of the prompt's log probabilities the next engine brings once more."""
        return 0 if self._token_ids[0] or 0 in self._ended else self._num_scores

    def _resumed(self) -> Request:
        """The request from where it stands."""
        timeout_s = None if self._deadline is None else self._deadline - time.monotonic()
        past = tuple(
            ResumedChoice(tuple(token_ids), index in self._ended)
            for index, token_ids in enumerate(self._token_ids)
        )
        return replace(self._request, resumed=past, was_accepted=True, timeout_s=timeout_s)
