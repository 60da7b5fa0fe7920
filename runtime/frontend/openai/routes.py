"""Who answers at each address."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response

from runtime.errors import UnavailableError
from runtime.frontend.http_ids import HEADER, request_id_of
from runtime.frontend.keys import DEFAULT_TENANT
from runtime.frontend.openai import answers
from runtime.frontend.openai.errors import check_model
from runtime.frontend.openai.exchange import JSON, Exchange, Reply
from runtime.frontend.openai.long_bodies import LongBodies
from runtime.frontend.openai.service import (
    BODIES,
    CHAT_COMPLETIONS,
    COMPLETIONS,
    Caller,
    OpenAIService,
)
from runtime.frontend.openai.tokenizing import (
    DetokenizeBody,
    TokenizeBody,
    detokenize,
    tokenize,
)
from runtime.frontend.prompts import PromptReader
from runtime.request import EngineStats, ModelInfo

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
REQUEST_ID_HEADER = HEADER.decode()
HTML = "text/html; charset=utf-8"
# A page asks nobody else for anything.
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; "
    "script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'"
)

Tokenizing = Callable[[bytes, PromptReader, ModelInfo, LongBodies], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What operators' tools ask for."""

    metrics: Callable[[], Awaitable[tuple[bytes, str]]]  # a scrape and its content type
    stats: Callable[[], Awaitable[Mapping[str, EngineStats]]]  # of engines, by address
    why_not_ready: Callable[[], str | None]  # why a request couldn't run now


class Routes:
    """Handlers, whose first lines of docstrings are in the OpenAPI document."""

    def __init__(
        self, service: OpenAIService, operations: Operations, *, write_timeout_s: float
    ) -> None:
        self._service = service
        self._operations = operations
        self._write_timeout_s = write_timeout_s

    async def completions(self, request: Request) -> Response:
        """Goes on with a prompt, or with several."""
        return self._generating(request, COMPLETIONS)

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        return self._generating(request, CHAT_COMPLETIONS)

    async def tokenize(self, request: Request) -> Response:
        """Turns a text or a chat into token ids, as generating does."""
        return self._tokenizing(request, TOKENIZE, tokenize, TokenizeBody.names())

    async def detokenize(self, request: Request) -> Response:
        """Turns token ids into text, with special tokens."""
        return self._tokenizing(request, DETOKENIZE, detokenize, DetokenizeBody.names())

    async def models(self, request: Request) -> Response:
        """Tells what is served."""
        content: answers.ModelList = {"object": "list", "data": [self._model()]}
        return _json(content)

    async def model(self, request: Request) -> Response:
        """Tells of one model."""
        check_model(request.path_params["model"], self._service.generator.model.name)
        return _json(self._model())

    async def health(self, request: Request) -> Response:
        """Answers while the process runs."""
        return _json(answers.Status(status="ok"))

    async def ready(self, request: Request) -> Response:
        """Answers 200 while requests are taken and can run, or else 503 with the reason."""
        reason = self._operations.why_not_ready()
        if reason is not None:
            raise UnavailableError(reason)
        return _json(answers.Status(status="ready"))

    async def metrics(self, request: Request) -> Response:
        """Tells Prometheus what the engines and frontends count."""
        content, kind = await self._operations.metrics()
        return Response(content, headers={"content-type": kind})

    async def stats(self, request: Request) -> Response:
        """Tells what the engines have done and hold, by their addresses."""
        engines = await self._operations.stats()
        return _json(
            {
                "model": asdict(self._service.generator.model),
                "engines": {address: asdict(each) for address, each in engines.items()},
            }
        )

    async def docs(self, request: Request) -> Response:
        """Shows the OpenAPI document."""
        page = files("runtime.frontend.openai").joinpath("docs.html").read_bytes()
        return page_response(HTML, page)

    def _model(self) -> answers.Model:
        model = self._service.generator.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._service.started_at,
            "owned_by": "lockstep",
            "max_model_len": model.max_model_len,
        }

    def _generating(self, request: Request, endpoint: str) -> Exchange:
        caller = _caller(request)

        async def work(content: bytes, reply: Reply) -> None:
            name = partial(reply.set_header, REQUEST_ID_HEADER)
            async with self._service.answering(endpoint, content, caller, name) as answering:
                if not answering.is_stream:
                    await reply.send_json(await answering.whole())
                    return
                async with aclosing(answering.chunks()) as chunks:
                    async for chunk in chunks:
                        await reply.send_event(chunk)
            await reply.end_events()

        return self._exchange(caller, work, BODIES[endpoint].names())

    def _tokenizing(
        self, request: Request, endpoint: str, call: Tokenizing, fields: Collection[str]
    ) -> Exchange:
        caller = _caller(request)

        async def work(content: bytes, reply: Reply) -> None:
            with self._service.taking(endpoint, caller):
                generator, bodies = self._service.generator, self._service.bodies
                answer = await call(content, generator.prompts, generator.model, bodies)
                await reply.send_json(answer)

        return self._exchange(caller, work, fields)

    def _exchange(
        self,
        caller: Caller,
        work: Callable[[bytes, Reply], Awaitable[None]],
        fields: Collection[str],
    ) -> Exchange:
        return Exchange(
            work,
            headers={REQUEST_ID_HEADER: caller.request_id},
            fields=fields,
            timeout_s=self._write_timeout_s,
        )


def page_response(kind: str, content: bytes) -> Response:
    """A page, or a part of one."""
    headers = {"content-type": kind, "content-security-policy": PAGE_POLICY}
    return Response(content, headers=headers)


def _caller(request: Request) -> Caller:
    scope = request.scope
    return Caller(
        tenant=scope.get("tenant", DEFAULT_TENANT),
        request_id=scope.get("request_id") or request_id_of(scope["headers"]),
        headers=request.headers,
    )


def _json(content: object) -> Response:
    return Response(to_json(content, inf_nan_mode="null"), media_type=JSON)
