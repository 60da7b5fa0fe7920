"""For tests of the frontend: small tokenizers, a client, engines that do what the test says."""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Self

import grpc
import pytest
import tokenizers
import uvloop
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import Metadata, bearer
from runtime.engine import Sink
from runtime.engine_service import EngineServer
from runtime.frontend.engine_client import EngineClient, Session
from runtime.frontend.server import Ports, run_frontend
from runtime.frontend_config import FrontendConfig
from runtime.request import EngineStats, FinishReason, ModelInfo, Request, RequestOutput
from runtime.sampling_params import CompleteParams
from tests.engine_stats import make_stats


def make_byte_fallback_tokenizer(lines: Sequence[str]) -> tokenizers.Tokenizer:
    """BPE over `lines` with "▁" for a space, and a token for each byte of what it doesn't know.

    As Gemma's; id 0 is <s>, id 1 is </s>.
    """
    training = tokenizers.Tokenizer(models.BPE())
    training.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False
    )
    training.train_from_iterator(lines, trainer)
    model = json.loads(training.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


API_KEY = "api-key"
TIMEOUT_S = 30
LINES = ["The quick brown fox jumps over the lazy dog.", "two words"]
VOCAB_SIZE = 600
MAX_MODEL_LEN = 4096


def make_model(path: str = "", **changes: Any) -> ModelInfo:
    model = ModelInfo(
        name="tiny",
        path=path,
        architecture="TinyForCausalLM",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(1,),
        tp_size=2,
    )
    return replace(model, **changes)


class FakeEngine:
    """An engine whose steps the test writes; what its connections ask for can be waited for."""

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self.added: SimpleQueue[tuple[FakeConnection, Request]] = SimpleQueue()
        self.aborted: SimpleQueue[int | tuple[int, int]] = SimpleQueue()
        self.closed: SimpleQueue[FakeConnection] = SimpleQueue()

    def connect(self, sink: Sink) -> "FakeConnection":
        return FakeConnection(self, sink)

    why_not_ready = None

    def on_readiness(self, callback: Callable[[str | None], None]) -> None:
        self.tell_readiness = callback

    def on_drain(self, callback: Callable[[], None]) -> None:
        self.tell_draining = callback

    def stats(self) -> EngineStats:
        return make_stats()


class FakeConnection:
    def __init__(self, engine: FakeEngine, sink: Sink) -> None:
        self.sink = sink
        self._engine = engine

    def add(self, request: Request) -> None:
        self._engine.added.put((self, request))

    def abort(self, request_id: int, choice: int | None = None) -> None:
        self._engine.aborted.put(request_id if choice is None else (request_id, choice))

    def close(self) -> None:
        self._engine.closed.put(self)


def ask(
    client: EngineClient, prompt: Sequence[int], params: CompleteParams, *, seed: int, **fields: Any
) -> Session:
    """A request on one engine's connection."""
    request = Request(request_id=0, prompt_token_ids=prompt, params=params, seed=seed, **fields)
    return client.generate(request)


async def added(engine: FakeEngine) -> tuple[FakeConnection, int]:
    """The next request that an engine is asked for, by its id."""
    connection, request = await asyncio.to_thread(engine.added.get, timeout=TIMEOUT_S)
    return connection, request.request_id


class EchoEngine(FakeEngine):
    """Answers each choice of a request with its own prompt, a token a step, all in step."""

    def answer(self, num_requests: int) -> None:
        """Waits for so many requests, then answers all of them, on a thread of its own."""
        threading.Thread(target=self._run, args=(num_requests,), name="echo", daemon=True).start()

    def _run(self, num_requests: int) -> None:
        requests = [self.added.get(timeout=TIMEOUT_S) for _ in range(num_requests)]
        for step in range(max(len(request.prompt_token_ids) for _, request in requests)):
            outputs: defaultdict[FakeConnection, list[RequestOutput]] = defaultdict(list)
            for connection, request in requests:
                prompt = request.prompt_token_ids
                if step < len(prompt):
                    reason = FinishReason.LENGTH if step == len(prompt) - 1 else None
                    token = (prompt[step],)
                    outputs[connection].extend(
                        RequestOutput(request.request_id, token, reason, index)
                        for index in range(request.params.n)
                    )
            for connection, batch in outputs.items():
                connection.sink(batch)


class RunningFrontend:
    """`run_frontend` on an event loop of its own thread. Use as a context manager."""

    def __init__(self, *servers: EngineServer, **changes: Any) -> None:
        """Of engines with the same token."""
        options = {"port": 0, "http_port": 0, "api_key": API_KEY, "resume_timeout_s": 0.0}
        options |= changes
        self._config = FrontendConfig(**options)
        self._engine_addresses = [f"127.0.0.1:{each.port}" for each in servers]
        self._engine_token = servers[0].token
        self._ready: SimpleQueue[Ports | BaseException] = SimpleQueue()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="frontend")
        self.ended: Future[None] = Future()  # what run_frontend returned or raised

    def __enter__(self) -> Self:
        """Raises what run_frontend raises before it is ready."""
        self._thread.start()
        ready = self._ready.get(timeout=TIMEOUT_S)
        if isinstance(ready, BaseException):
            self._thread.join()
            raise ready
        self.address = f"127.0.0.1:{ready.grpc}"
        self.http_address = f"127.0.0.1:{ready.http}"
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def cancel(self) -> None:
        """What SIGTERM does."""
        if not self.ended.done():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._main())
            except BaseException as error:
                self._ready.put(error)
                self.ended.set_exception(error)
            else:
                self.ended.set_result(None)

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        await run_frontend(
            self._config, self._engine_addresses, self._engine_token, self._ready.put
        )


class Client:
    """The public API with a key."""

    def __init__(self, channel: grpc.Channel, key: str = API_KEY) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._metadata = bearer(key)

    def generate(
        self,
        text: str | None = None,
        *,
        token_ids: list[int] | None = None,
        chat: inference_pb2.Chat | None = None,
        timeout_s: float | None = TIMEOUT_S,
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        metadata: Metadata = (),
        resume: inference_pb2.Resume | None = None,
        **params: object,
    ) -> grpc.Call:
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            text=text,
            token_ids=None if token_ids is None else inference_pb2.TokenIds(ids=token_ids),
            chat=chat,
            sampling_params=common_pb2.SamplingParams(**params),
            cache_salt=cache_salt,
            priority=priority,
            resume=resume,
        )
        metadata = (*self._metadata, *metadata)
        return self._stub.Generate(request, metadata=metadata, timeout=timeout_s)

    def call(self, method: str, **fields: object) -> object:
        request = getattr(inference_pb2, f"{method}Request")(**fields)
        call = getattr(self._stub, method)
        return call(request, metadata=self._metadata, timeout=TIMEOUT_S)


def status_of(call: object) -> tuple[grpc.StatusCode, str]:
    """How a call fails, whatever it brought before."""
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    return raised.value.code(), raised.value.details()
