"""The public gRPC service, lockstep.v1.Inference."""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import grpc
import grpc.aio

from protos import inference_pb2, inference_pb2_grpc
from protos.auth import KeyRing
from runtime.engine_codec import decode_params, encode_stats, refuse_unknown_fields
from runtime.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    LockstepError,
    UnavailableError,
)
from runtime.frontend.answer import Answer
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.text import Tokenizer

LONG_TEXT_BYTES = 64 << 10
MAX_CACHE_SALT_BYTES = 256
# What gRPC clients with a retry policy go by.
RETRY_HEADER = "grpc-retry-pushback-ms"

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

STATUS = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    LockstepError: grpc.StatusCode.INTERNAL,
}


def status_of(error: LockstepError) -> grpc.StatusCode:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers clients from one engine; `tokenizer` is None where the model's folder has none.

    `keys` have the names of tenants, and have let each call pass.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        keys: KeyRing,
        *,
        max_prompt_bytes: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._keys = keys
        self._max_prompt_bytes = max_prompt_bytes
        self._long_texts = asyncio.Semaphore(1)

    # Written to the context, not yielded: a client that leaves while a message is being sent is
    # then an exception here, which ends the request at once.
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with _reporting(context):
            refuse_unknown_fields("the request", request)
            params = decode_params(request.sampling_params)
            _check_salt(request.cache_salt)
            seed = secrets.randbits(64) if params.seed is None else params.seed
            prompt = await self._prompt_of(request)
            outputs = self._engine.generate(
                prompt,
                params,
                seed=seed,
                cache_salt=request.cache_salt,
                priority=request.priority,
                tenant=self._tenant_of(context),
                timeout_s=context.time_remaining(),
            )
            async with aclosing(outputs):
                answer = Answer(
                    request.request_id, prompt, self._tokenizer, num_choices=params.n, seed=seed
                )
                async for output in outputs:
                    await context.write(answer.extend(output))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with _reporting(context):
            return inference_pb2.TokenizeResponse(
                token_ids=await self._encode("text", request.text)
            )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        async with _reporting(context):
            return inference_pb2.DetokenizeResponse(text=await self._decode(request.token_ids))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        model = self._engine.model
        return inference_pb2.GetModelResponse(
            model=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            tp_size=model.tp_size,
        )

    async def GetStats(
        self, request: inference_pb2.GetStatsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetStatsResponse:
        async with _reporting(context):
            return inference_pb2.GetStatsResponse(stats=encode_stats(await self._engine.stats()))

    def _tenant_of(self, context: grpc.aio.ServicerContext) -> str:
        """By the key alone: what else a client says of itself isn't believed."""
        tenant = self._keys.name_of(context.invocation_metadata())
        assert tenant is not None, "a call without a key has passed the interceptor"
        return tenant

    async def _prompt_of(self, request: inference_pb2.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                if not request.text:
                    # Also where the tokenizer would add a token that begins every text.
                    raise InvalidRequestError("prompt is empty: it must have at least 1 character")
                return await self._encode("prompt", request.text)
            case "token_ids":
                return self._bounded(request.token_ids.ids)
            case _:
                raise InvalidRequestError("prompt is missing: set text or token_ids")

    def _bounded(self, token_ids: Sequence[int]) -> list[int]:
        """A copy of the ids, which are not too many: millions would stall all other requests."""
        limit = self._engine.model.max_model_len
        if len(token_ids) > limit:
            raise InvalidRequestError(
                f"prompt of {len(token_ids)} tokens is more than max_model_len={limit}"
            )
        return list(token_ids)

    async def _encode(self, name: str, text: str) -> list[int]:
        num_bytes = len(text.encode())
        if num_bytes > self._max_prompt_bytes:
            raise InvalidRequestError(
                f"{name} of {num_bytes} bytes is longer than "
                f"max_prompt_bytes={self._max_prompt_bytes}"
            )
        encode = self._get_tokenizer().encode
        if num_bytes <= LONG_TEXT_BYTES:
            return await asyncio.to_thread(encode, text)
        # One after another, so that short prompts find a core and memory stays bounded.
        async with self._long_texts:
            return await asyncio.to_thread(encode, text)

    async def _decode(self, token_ids: Sequence[int]) -> str:
        model = self._engine.model
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
        decode: Callable[[list[int]], str] = self._get_tokenizer().decode
        return await asyncio.to_thread(decode, list(token_ids))

    def _get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"model {self._engine.model.name} has no tokenizer.json, so this server can't turn "
                "text into tokens or back: send token_ids"
            )
        return self._tokenizer


def _check_salt(salt: str) -> None:
    num_bytes = len(salt.encode())
    if num_bytes > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(
            f"cache_salt of {num_bytes} bytes is longer than {MAX_CACHE_SALT_BYTES}"
        )


@asynccontextmanager
async def _reporting(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    try:
        yield
    except LockstepError as error:
        await context.abort(status_of(error), str(error), _hints(error))


def _hints(error: LockstepError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata."""
    if isinstance(error, CapacityError):
        return ((RETRY_HEADER, str(math.ceil(error.retry_after_s * 1000))),)
    return ()
