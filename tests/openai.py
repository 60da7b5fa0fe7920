"""The HTTP app over engines that say what the test wants, and clients of it."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import httpx2
import uvicorn
import uvloop

from runtime.engine_service import EngineServer
from runtime.frontend.chat import ChatTemplate
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.engine_pool import EnginePool
from runtime.frontend.generator import Generator, Limits
from runtime.frontend.metrics import FrontendMetrics
from runtime.frontend.observer import Observer
from runtime.frontend.openai.app import make_app
from runtime.frontend.openai.parsing import ParserChoice
from runtime.frontend.openai.routes import Operations
from runtime.frontend.openai.service import OpenAIService
from runtime.frontend.prompts import PromptReader
from runtime.frontend.text import Tokenizer
from runtime.frontend.tracing import NoTracing
from runtime.request import (
    FinishReason,
    Request,
    RequestFailure,
    RequestOutput,
    Start,
    TokenLogprobs,
)
from tests.frontend import LINES, FakeConnection, FakeEngine, make_byte_fallback_tokenizer
from tests.frontend import make_model as make_tiny_model

if TYPE_CHECKING:
    from runtime.errors import LockstepError

TIMEOUT_S = 30
CREATED = 1_700_000_000
MAX_BYTES = 1 << 20
EOS = 1  # </s>
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

# Each shows, as a model's own template does, how the model writes calls and marks its reasoning.
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HERMES_TEMPLATE = "{% if tools %}<tool_call> {{ tools | tojson }} {% endif %}" + CHAT_TEMPLATE
THINKING_TEMPLATE = "{# <think> #}" + HERMES_TEMPLATE
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at something.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["door", "fox"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


def write_model(folder: Path) -> Path:
    """A tokenizer that knows every text; returns the folder."""
    folder.mkdir(exist_ok=True)
    make_byte_fallback_tokenizer(LINES).save(str(folder / "tokenizer.json"))
    return folder


class SayingEngine(FakeEngine):
    """Answers each request at once: with its next text, some tokens a step.

    Texts go to the choices of a request one after the other, and the last one to all that follow.
    """

    def __init__(self, folder: Path, **model: Any) -> None:
        fields = {"eos_token_ids": (EOS,), "fingerprint": "f" * 32} | model
        super().__init__(make_tiny_model(str(folder), **fields))
        tokenizer = Tokenizer.load(str(folder))
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.texts: list[str] = ["hi"]
        self.tokens_per_step = 1
        self.requests: list[Request] = []
        self.failure: LockstepError | None = None  # ends each request
        self.fails_after = 1  # steps

    def connect(self, sink: Any) -> "_SayingConnection":
        return _SayingConnection(self, sink)

    def text(self, choice: int) -> str:
        return self.texts[min(choice, len(self.texts) - 1)]

    def tokens_of(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class _SayingConnection(FakeConnection):
    _engine: SayingEngine

    def add(self, request: Request) -> None:
        self._engine.requests.append(request)
        threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _answer(self, request: Request) -> None:
        self._score(request)
        for choice in range(request.params.n):
            tokens = self._engine.tokens_of(self._engine.text(choice))
            most = request.params.max_tokens
            ends = len(tokens) < most
            tokens = [*tokens, EOS] if ends else tokens[:most]
            step = self._engine.tokens_per_step
            for number, place in enumerate(range(0, len(tokens), step)):
                if self._engine.failure is not None and number == self._engine.fails_after:
                    self.sink([RequestFailure(request.request_id, self._engine.failure)])
                    return
                part = tuple(tokens[place : place + step])
                reason = None
                if place + step >= len(tokens):
                    reason = FinishReason.STOP if ends else FinishReason.LENGTH
                self._bring(request, part, reason, choice)

    def _score(self, request: Request) -> None:
        count = request.params.prompt_logprobs
        if count is not None:
            scores = tuple(logprobs_of(each, count) for each in request.prompt_token_ids[1:])
            self.sink([RequestOutput(request.request_id, (), scores=scores)])

    def _bring(
        self, request: Request, tokens: tuple[int, ...], reason: FinishReason | None, choice: int
    ) -> None:
        count = request.params.logprobs
        logprobs = () if count is None else tuple(logprobs_of(each, count) for each in tokens)
        output = RequestOutput(
            request.request_id,
            tokens,
            reason,
            choice,
            num_cached_tokens=2,
            logprobs=logprobs,
            start=Start(0.25, 0.5),
        )
        self.sink([output])


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    """What SayingEngine tells of a token: it is the most probable one."""
    tops = tuple((token + place) % 300 for place in range(count))
    return TokenLogprobs(-token / 8, tops, tuple(-token / 8 - place for place in range(count)))


class Ends(FrontendMetrics):
    """Tells each request's end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: SimpleQueue[tuple[str, str]] = SimpleQueue()  # endpoint and status

    def count_request(self, endpoint: str, status: str, duration_s: float) -> None:
        super().count_request(endpoint, status, duration_s)
        self.ended.put((endpoint, status))


class RunningApp:
    """The app on an event loop of its own thread, with one engine. Use as a context manager."""

    def __init__(
        self,
        engine: Any,
        folder: Path,
        *,
        template: str | None = CHAT_TEMPLATE,
        limits: Limits = Limits(),  # noqa: B008
        parsers: dict[str, Any] | None = None,
        max_prompt_bytes: int = MAX_BYTES,
        pages: dict[str, tuple[str, bytes]] | None = None,
        write_timeout_s: float = TIMEOUT_S,
        **service_options: Any,
    ) -> None:
        self.engine = engine
        self.metrics = Ends()
        self._folder = folder
        self._template = template
        self._limits = limits
        self._parsers = parsers or {}
        self._max_prompt_bytes = max_prompt_bytes
        self._app_options = {"pages": pages, "write_timeout_s": write_timeout_s}
        self._service_options = {"clock": lambda: float(CREATED)} | service_options
        self._server = EngineServer(engine, "engine-token")
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._loop = uvloop.new_event_loop()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="app")
        self.address: tuple[str, int] = self._socket.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self.service: OpenAIService
        self.pool: EnginePool

    def __enter__(self) -> Self:
        self._server.start()
        self._thread.start()
        self._started.result(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self._server.stop(grace_s=5)

    def call(self, make: Callable[[], Any]) -> Any:
        """What a coroutine returns that `make` makes, on the app's loop."""
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._main())
            except BaseException as error:
                if self._started.done():
                    raise
                self._started.set_exception(error)

    async def _main(self) -> None:
        self.pool = pool = await EnginePool.connect(
            [f"127.0.0.1:{self._server.port}"],
            lambda address: EngineClient.connect(address, "engine-token"),
            resume_timeout_s=0.0,
        )
        template = None
        if self._template is not None:
            template = ChatTemplate({"default": self._template}, {}, max_bytes=MAX_BYTES)
        reader = PromptReader(
            pool.model,
            Tokenizer.load(str(self._folder)),
            template,
            max_prompt_bytes=self._max_prompt_bytes,
            chat_template_timeout_s=TIMEOUT_S,
        )
        self.service = OpenAIService(
            Generator(pool, reader, self._limits),
            Observer(self.metrics, NoTracing(), model=pool.model.name),
            ParserChoice(template, **self._parsers),
            **self._service_options,
        )
        app = make_app(
            self.service,
            Operations(
                metrics=self._scrape,
                stats=pool.stats,
                why_not_ready=self._service_options.get("why_refused", pool.why_not_ready),
            ),
            **self._app_options,
        )
        config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False)
        self._uvicorn = uvicorn.Server(config)
        self._started.set_result(None)
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            await pool.close()
            if template is not None:
                await asyncio.to_thread(template.close)

    async def _scrape(self) -> tuple[bytes, str]:
        return self.metrics.render(await self.pool.stats(), self.pool.model)


@contextmanager
def http_client(app: RunningApp, **options: Any) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=app.url, timeout=TIMEOUT_S, **options) as client:
        yield client


def complete(client: httpx2.Client, prompt: object = "two words", **fields: Any) -> dict[str, Any]:
    """A whole completion."""
    return good(client.post(COMPLETIONS, json={"model": "tiny", "prompt": prompt} | fields))


def chat(
    client: httpx2.Client, messages: Sequence[object] | None = None, **fields: Any
) -> dict[str, Any]:
    """A whole answer of a chat."""
    return good(client.post(CHAT, json=chat_body(messages, **fields)))


def chat_body(messages: Sequence[object] | None = None, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}] if messages is None else messages
    return {"model": "tiny", "messages": messages} | fields


def good(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def events(client: httpx2.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well."""
    response = client.post(path, json={"stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(each.startswith("data: ") for each in chunks)
    return [json.loads(each.removeprefix("data: ")) for each in chunks]


def refused(response: httpx2.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal in OpenAI's shape."""
    assert response.status_code == status, response.text
    content = response.json()
    assert content.keys() == {"error"}
    error: dict[str, Any] = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
