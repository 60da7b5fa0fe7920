"""OpenAI's API without HTTP: bodies in, answers out."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from runtime.errors import InvalidRequestError, UnavailableError
from runtime.frontend.generator import Generator, TextStream
from runtime.frontend.http_ids import MAX_ID_CHARACTERS, is_request_id
from runtime.frontend.keys import DEFAULT_TENANT
from runtime.frontend.observer import Observer, SeenRequest
from runtime.frontend.openai.answers import Usage
from runtime.frontend.openai.body import Body
from runtime.frontend.openai.chat_body import ChatBody
from runtime.frontend.openai.chats import ChatRequest
from runtime.frontend.openai.completion_body import CompletionBody
from runtime.frontend.openai.completions import CompletionRequest
from runtime.frontend.openai.errors import check_model
from runtime.frontend.openai.job import (
    Head,
    Job,
    JsonObject,
    Writer,
    give_way,
    read_all,
    usage_of,
)
from runtime.frontend.openai.long_bodies import LongBodies
from runtime.frontend.openai.parsing import ParserChoice
from runtime.frontend.prompts import PromptReader
from runtime.frontend.request_record import Headers
from runtime.frontend.request_slots import RequestSlots, Slots

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
BODIES: Mapping[str, type[Body]] = {COMPLETIONS: CompletionBody, CHAT_COMPLETIONS: ChatBody}

# Raises CapacityError: the tenant has too many requests at once.
TakeSlot = Callable[[str], AbstractContextManager[Slots]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and what came beside the body; header names are in lower case."""

    tenant: str = DEFAULT_TENANT
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # need not be unique
    headers: Headers = field(default_factory=dict)


class Request(Protocol):
    """What was read of a body."""

    @property
    def job(self) -> Job: ...

    @property
    def model(self) -> str: ...

    @property
    def request_id(self) -> str | None: ...

    async def writer(self, head: Head, reader: PromptReader) -> Writer: ...


class Taken(NamedTuple):
    """What a request holds while it is looked after."""

    seen: SeenRequest
    slots: Slots


class Answering:
    """One request's answer, to be taken whole or, where it is a stream, in chunks."""

    def __init__(
        self, job: Job, writer: Writer, streams: Sequence[TextStream], seen: SeenRequest
    ) -> None:
        self._job = job
        self._writer = writer
        self._streams = streams
        self._seen = seen

    @property
    def is_stream(self) -> bool:
        return self._job.is_stream

    async def whole(self) -> JsonObject:
        async with aclosing(read_all(self._streams)) as deltas:
            async for place, delta in deltas:
                self._seen.delivered(len(delta.token_ids))
                self._writer.extend(place, delta)
        return self._writer.whole(self._usage())

    async def chunks(self) -> AsyncGenerator[JsonObject, None]:
        """Close it in the end."""
        async with aclosing(read_all(self._streams)) as deltas:
            async for place, delta in deltas:
                for chunk in self._writer.chunks(place, delta):
                    yield chunk
                self._seen.delivered(len(delta.token_ids))
        if self._job.includes_usage:
            yield self._writer.usage_chunk(self._usage())

    def _usage(self) -> Usage:
        return usage_of(self._streams, is_scoring=self._job.is_scoring)


class OpenAIService:
    """Answers requests of all ways in that know OpenAI's bodies. For one event loop."""

    def __init__(
        self,
        generator: Generator,
        observer: Observer,
        parsers: ParserChoice,
        *,
        why_refused: Callable[[], str | None] = lambda: None,
        take_slot: TakeSlot | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`why_refused` says why no request is taken now; `clock` tells seconds since 1970.

        `take_slot` is held by a tenant's request to its end, and grows with its prompts.
        """
        self.generator = generator
        self._why_refused = why_refused
        self.started_at = int(clock())
        self._observer = observer
        self._parsers = parsers
        self._clock = clock
        self._take_slot = take_slot or RequestSlots(None).take
        self.bodies = LongBodies()

    async def answer(self, endpoint: str, content: bytes, caller: Caller) -> JsonObject:
        """The whole answer to a body. Raises a LockstepError: it can't be answered.

        InvalidRequestError, too, where the body wants a stream.
        """
        async with self.answering(endpoint, content, caller) as answering:
            if answering.is_stream:
                raise InvalidRequestError("stream=true can't be served here: leave it out")
            return await answering.whole()

    @asynccontextmanager
    async def answering(
        self,
        endpoint: str,
        content: bytes,
        caller: Caller,
        on_label: Callable[[str], None] = lambda label: None,
    ) -> AsyncIterator[Answering]:
        """An answer while it is made; what isn't finished at the end of the block is given up.

        `on_label` is told the request's id where the body has one instead of the caller's. Raises a
        LockstepError: the request is refused before the engine gets it.
        """
        with self.taking(endpoint, caller) as (seen, slots):
            request = await self._read(endpoint, content)
            check_model(request.model, self.generator.model.name)
            label = _label_of(request, caller)
            seen.name(label)
            on_label(label)
            slots.grow(len(request.job.prompts) - 1)
            async with AsyncExitStack() as stack:
                streams = []
                for prompt in request.job.prompts:
                    stream = await self._start(request.job, prompt, caller.tenant)
                    streams.append(await stack.enter_async_context(aclosing(stream)))
                    stack.push_async_callback(give_way)
                    seen.started(stream)
                    await give_way()
                writer = await request.writer(self._head(label), self.generator.prompts)
                yield Answering(request.job, writer, streams, seen)

    @contextmanager
    def taking(self, endpoint: str, caller: Caller) -> Iterator[Taken]:
        """A request while it is looked after: counted, with a slot of its tenant's.

        Raises UnavailableError: none is taken now. Raises CapacityError: the tenant has too many.
        """
        with (
            self._observer.request(
                endpoint, caller.request_id, caller.tenant, caller.headers
            ) as seen,
            self._take_slot(caller.tenant) as slots,
        ):
            self.check_taken()
            yield Taken(seen, slots)

    def check_taken(self) -> None:
        """Raises UnavailableError: no request is taken now."""
        reason = self._why_refused()
        if reason is not None:
            raise UnavailableError(reason)

    async def _read(self, endpoint: str, content: bytes) -> Request:
        prompts, model, bodies = self.generator.prompts, self.generator.model, self.bodies
        match endpoint:
            case "/v1/completions":
                return await CompletionRequest.read(content, prompts, model, bodies)
            case "/v1/chat/completions":
                return await ChatRequest.read(content, prompts, model, bodies, self._parsers)
            case _:
                raise InvalidRequestError(f"url={endpoint[:80]!r} must be {' or '.join(BODIES)}")

    async def _start(self, job: Job, prompt: Sequence[int], tenant: str) -> TextStream:
        return await self.generator.start(
            prompt,
            job.params,
            tenant=tenant,
            cache_salt=job.cache_salt,
            priority=job.priority,
            kept_special_ids=job.kept_special_ids,
        )

    def _head(self, request_id: str) -> Head:
        model = self.generator.model
        return Head(request_id, int(self._clock()), model.name, model.fingerprint or None)


def _label_of(request: Request, caller: Caller) -> str:
    label = request.request_id
    if label is None:
        return caller.request_id
    if not is_request_id(label):
        raise InvalidRequestError(
            f"request_id of {len(label)} characters must be printable ASCII and have 1 to "
            f"{MAX_ID_CHARACTERS}"
        )
    return label
