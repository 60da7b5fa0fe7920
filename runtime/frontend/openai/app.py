"""The HTTP face as an ASGI application, with a description of itself."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from runtime.errors import LockstepError
from runtime.frontend.openai import answers
from runtime.frontend.openai.chat_body import ChatBody
from runtime.frontend.openai.completion_body import CompletionBody
from runtime.frontend.openai.documents import (
    MESSAGES,
    MODEL_PARAMETER,
    chat_responses,
    completion_responses,
    request_body,
    responses,
)
from runtime.frontend.openai.errors import (
    STATUSES,
    Kind,
    body_of,
    error_body,
    headers_of,
    kind_of,
)
from runtime.frontend.openai.exchange import INTERNAL_ERROR, JSON
from runtime.frontend.openai.not_served import unknown_address
from runtime.frontend.openai.routes import (
    DETOKENIZE,
    TOKENIZE,
    Operations,
    Routes,
    page_response,
)
from runtime.frontend.openai.service import CHAT_COMPLETIONS, COMPLETIONS, OpenAIService
from runtime.frontend.openai.tokenizing import DetokenizeBody, TokenizeBody

logger = logging.getLogger(__name__)

# Content type and content of a static file, by its address.
Pages = Mapping[str, tuple[str, bytes]]
# A Kubernetes probe, or a browser that opens a page, has no key.
OPEN_PATHS = ("/health", "/ready", "/docs", "/openapi.json")

Handler = Callable[[Request], Awaitable[Response]]


def make_app(
    service: OpenAIService,
    operations: Operations,
    *,
    pages: Pages | None = None,
    write_timeout_s: float = 60.0,
) -> FastAPI:
    """OpenAI's API, what belongs to it, and `pages`.

    Who checks keys puts the tenant into scope["tenant"], and lets OPEN_PATHS and pages pass. A
    client that takes nothing for `write_timeout_s` gets no more.
    """
    app = FastAPI(
        title="Lockstep",
        version=version("lockstep-serving"),
        description="OpenAI's API for a model, with what a server's operator needs.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # to an address that the client's own header would say
    )
    routes = Routes(service, operations, write_timeout_s=write_timeout_s)
    _add_generating(app, routes, service.generator.model.name)
    _add_asking(app, routes)
    for path, (kind, content) in (pages or {}).items():
        _add_page(app, path, kind, content)
    app.add_exception_handler(LockstepError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_address)
    app.add_exception_handler(Exception, _fail)
    return app


def _add_generating(app: FastAPI, routes: Routes, model: str) -> None:
    _post(
        app,
        COMPLETIONS,
        routes.completions,
        completion_responses(),
        request_body(CompletionBody, {"model": model, "prompt": "Once", "max_tokens": 8}),
    )
    _post(
        app,
        CHAT_COMPLETIONS,
        routes.chat_completions,
        chat_responses(),
        request_body(ChatBody, {"model": model, "messages": MESSAGES, "max_tokens": 8}),
    )
    _post(
        app,
        TOKENIZE,
        routes.tokenize,
        responses(answers.Tokens),
        request_body(TokenizeBody, {"prompt": "Once"}),
    )
    _post(
        app,
        DETOKENIZE,
        routes.detokenize,
        responses(answers.DetokenizedText),
        request_body(DetokenizeBody, {"tokens": [1]}),
    )


def _add_asking(app: FastAPI, routes: Routes) -> None:
    _get(app, "/v1/models", routes.models, responses(answers.ModelList))
    _get(
        app,
        "/v1/models/{model:path}",
        routes.model,
        responses(answers.Model),
        {"parameters": [MODEL_PARAMETER]},
    )
    _get(app, "/stats", routes.stats, responses(dict[str, Any]))
    _get(app, "/metrics", routes.metrics, {200: {"content": {"text/plain": {}}}})
    _get(app, "/health", routes.health, {200: {"model": answers.Status}}, is_open=True)
    ready = responses(answers.Status)
    _get(app, "/ready", routes.ready, {key: ready[key] for key in (200, 503)}, is_open=True)
    for path, handler in (("/health", routes.health), ("/ready", routes.ready)):
        app.add_api_route(
            path, handler, methods=["HEAD"], include_in_schema=False, response_model=None
        )
    app.add_api_route("/docs", routes.docs, include_in_schema=False, response_model=None)


def _post(
    app: FastAPI,
    path: str,
    handler: Handler,
    documented: dict[int | str, dict[str, Any]],
    extra: dict[str, Any],
) -> None:
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        responses=documented,
        openapi_extra=extra,
        dependencies=[Depends(HTTPBearer(auto_error=False))],
        response_model=None,
    )


def _get(
    app: FastAPI,
    path: str,
    handler: Handler,
    documented: dict[int | str, dict[str, Any]],
    extra: dict[str, Any] | None = None,
    *,
    is_open: bool = False,
) -> None:
    app.add_api_route(
        path,
        handler,
        methods=["GET"],
        responses=documented,
        openapi_extra=extra,
        dependencies=[] if is_open else [Depends(HTTPBearer(auto_error=False))],
        response_model=None,
    )


def _add_page(app: FastAPI, path: str, kind: str, content: bytes) -> None:
    async def page() -> Response:
        return page_response(kind, content)

    app.add_api_route(path, page, include_in_schema=False, response_model=None)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, LockstepError)
    return _response(kind_of(error).status, body_of(error, ()), headers_of(error))


async def _refuse_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return await _refuse(request, unknown_address(path))
    kind = STATUSES.get(error.status_code, Kind(error.status_code, "invalid_request_error", None))
    message = str(error.detail)
    if error.status_code == 405:
        message = f"{request.method[:80]} can't be used at {path[:80]}"
    return _response(kind.status, error_body(kind, message), error.headers or {})


async def _fail(request: Request, error: Exception) -> Response:
    """The server logs the error, which is raised again."""
    return _response(500, error_body(STATUSES[500], INTERNAL_ERROR), {})


def _response(status: int, content: object, headers: Mapping[str, str]) -> Response:
    return Response(to_json(content), status, headers=dict(headers), media_type=JSON)
