"""The public gRPC service, lockstep.v1.Inference."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NoReturn, Protocol

import grpc
import grpc.aio

from protos import inference_pb2, inference_pb2_grpc
from protos.auth import KeyRing, Metadata
from runtime.engine_codec import (
    decode_params,
    encode_defaults,
    refuse_unknown_fields,
)
from runtime.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    FingerprintError,
    InvalidRequestError,
    LockstepError,
    UnavailableError,
)
from runtime.frontend.answer import Answer, decode_chat, decode_resume
from runtime.frontend.engine_pool import EnginePool
from runtime.frontend.generator import Generator, TextStream
from runtime.frontend.observer import Observer, SeenRequest
from runtime.frontend.request_slots import RequestSlots
from runtime.frontend.resume import Resume
from runtime.stats_codec import encode_stats

# What gRPC clients with a retry policy go by.
RETRY_HEADER = "grpc-retry-pushback-ms"

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

GENERATE = f"/{SERVICE}/Generate"

STATUS = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    FingerprintError: grpc.StatusCode.FAILED_PRECONDITION,
    LockstepError: grpc.StatusCode.INTERNAL,
}


class CallContext(Protocol):
    """What the service needs of grpc.aio.ServicerContext."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def time_remaining(self) -> float | None: ...

    async def write(self, message: inference_pb2.GenerateResponse) -> None: ...

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata
    ) -> NoReturn: ...


def status_of(error: LockstepError) -> grpc.StatusCode:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers clients.

    `keys` have the names of tenants, and have let each call pass.
    """

    def __init__(
        self,
        generator: Generator,
        engines: EnginePool,
        keys: KeyRing,
        observer: Observer,
        slots: RequestSlots,
        *,
        why_refused: Callable[[], str | None],
        write_timeout_s: float,
    ) -> None:
        """`why_refused` says why no request is taken now.

        A client that takes nothing for `write_timeout_s` gets no more.
        """
        self._generator = generator
        self._engines = engines
        self._keys = keys
        self._observer = observer
        self._slots = slots
        self._why_refused = why_refused
        self._write_timeout_s = write_timeout_s

    # Written to the context, not yielded: a client that leaves while a message is being sent is
    # then an exception here, which ends the request at once.
    async def Generate(self, request: inference_pb2.GenerateRequest, context: CallContext) -> None:
        async with _reporting(context):
            tenant = self._tenant_of(context)
            headers = {
                key: value
                for key, value in context.invocation_metadata() or ()
                if isinstance(value, str)
            }
            with (
                self._observer.request(GENERATE, request.request_id, tenant, headers) as seen,
                self._slots.take(tenant),
            ):
                if (reason := self._why_refused()) is not None:
                    raise UnavailableError(reason)
                stream = await self._start(request, context, tenant)
                async with aclosing(stream):
                    seen.started(stream)
                    await self._answer(request.request_id, stream, context, seen)

    async def _answer(
        self,
        request_id: str,
        stream: TextStream,
        context: CallContext,
        seen: SeenRequest,
    ) -> None:
        prompts, model = self._generator.prompts, self._generator.model
        answer = Answer(request_id, stream, prompts.tokenizer, model.fingerprint)
        if stream.is_complete:
            await self._write(context, answer.message(None))
        async for delta in stream:
            await self._write(context, answer.message(delta))
            seen.delivered(len(delta.token_ids))

    async def _write(self, context: CallContext, message: inference_pb2.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await context.write(message)
        except TimeoutError as error:
            raise DeadlineError(
                f"the client has taken nothing for write_timeout_s={self._write_timeout_s:g}"
            ) from error

    async def _start(
        self,
        request: inference_pb2.GenerateRequest,
        context: CallContext,
        tenant: str,
    ) -> TextStream:
        refuse_unknown_fields("the request", request)
        asked = decode_params(request.sampling_params)
        resume = decode_resume(request.resume) if request.HasField("resume") else None
        return await self._generator.start(
            await self._read_prompt(request, resume),
            asked,
            tenant=tenant,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_s=context.time_remaining(),
            resume=resume,
        )

    async def _read_prompt(
        self, request: inference_pb2.GenerateRequest, resume: Resume | None
    ) -> list[int]:
        prompts = self._generator.prompts
        kind = request.WhichOneof("prompt")
        if resume is not None and kind is not None:
            raise InvalidRequestError(f"{kind} and resume are set: resume says what the prompt is")
        if resume is not None:
            return prompts.read_ids(resume.prompt_token_ids)
        match kind:
            case "text":
                return await prompts.read_text(request.text)
            case "token_ids":
                return prompts.read_ids(request.token_ids.ids)
            case "chat":
                chat = decode_chat(request.chat, max_bytes=prompts.max_prompt_bytes)
                return (await prompts.read_chat(chat)).token_ids
            case _:
                raise InvalidRequestError("prompt is missing: set text, token_ids or chat")

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: CallContext
    ) -> inference_pb2.TokenizeResponse:
        async with _reporting(context):
            return inference_pb2.TokenizeResponse(
                token_ids=await self._generator.prompts.encode("text", request.text)
            )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: CallContext
    ) -> inference_pb2.DetokenizeResponse:
        async with _reporting(context):
            return inference_pb2.DetokenizeResponse(text=await self._decode(request.token_ids))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: CallContext
    ) -> inference_pb2.GetModelResponse:
        model = self._generator.model
        return inference_pb2.GetModelResponse(
            model=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            tp_size=model.tp_size,
            default_sampling_params=encode_defaults(model.defaults),
            model_fingerprint=model.fingerprint,
        )

    async def GetStats(
        self, request: inference_pb2.GetStatsRequest, context: CallContext
    ) -> inference_pb2.GetStatsResponse:
        async with _reporting(context):
            stats = await self._engines.stats()
            return inference_pb2.GetStatsResponse(
                engines=[
                    inference_pb2.EngineStatus(address=address, stats=encode_stats(each))
                    for address, each in stats.items()
                ]
            )

    def _tenant_of(self, context: CallContext) -> str:
        """By the key alone: what else a client says of itself isn't believed."""
        tenant = self._keys.name_of(context.invocation_metadata() or ())
        assert tenant is not None, "a call without a key has passed the interceptor"
        return tenant

    async def _decode(self, token_ids: Sequence[int]) -> str:
        model = self._generator.model
        if len(token_ids) > model.max_model_len:
            raise InvalidRequestError(
                f"token_ids has {len(token_ids)} tokens: "
                f"more than max_model_len={model.max_model_len}"
            )
        for extreme in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= extreme < model.vocab_size:
                raise InvalidRequestError(
                    f"token id {extreme} must be in [0, {model.vocab_size}), the vocabulary"
                )
        decode: Callable[[list[int]], str] = self._generator.prompts.require_tokenizer().decode
        return await asyncio.to_thread(decode, list(token_ids))


@asynccontextmanager
async def _reporting(context: CallContext) -> AsyncIterator[None]:
    try:
        yield
    except LockstepError as error:
        await context.abort(status_of(error), str(error), _hints(error))


def _hints(error: LockstepError) -> Metadata:
    """Trailing metadata."""
    if isinstance(error, CapacityError):
        return ((RETRY_HEADER, str(math.ceil(error.retry_after_s * 1000))),)
    return ()
