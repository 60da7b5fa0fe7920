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
from runtime.engine_codec import (
    decode_params,
    encode_defaults,
    encode_stats,
    refuse_unknown_fields,
)
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
from runtime.frontend.prompts import PromptReader

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
    """Answers clients from one engine.

    `keys` have the names of tenants, and have let each call pass.
    """

    def __init__(self, engine: EngineClient, prompts: PromptReader, keys: KeyRing) -> None:
        self._engine = engine
        self._prompts = prompts
        self._keys = keys

    # Written to the context, not yielded: a client that leaves while a message is being sent is
    # then an exception here, which ends the request at once.
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with _reporting(context):
            refuse_unknown_fields("the request", request)
            asked = decode_params(request.sampling_params)
            _check_salt(request.cache_salt)
            prompt = await self._prompts.read(request)
            params = self._engine.model.complete(asked, num_prompt_tokens=len(prompt))
            seed = secrets.randbits(64) if params.seed is None else params.seed
            outputs = self._engine.generate(
                prompt,
                params,
                seed=seed,
                bad_words=await self._prompts.bad_words(params),
                cache_salt=request.cache_salt,
                priority=request.priority,
                tenant=self._tenant_of(context),
                timeout_s=context.time_remaining(),
            )
            tokenizer = self._prompts.tokenizer
            async with aclosing(outputs):
                answer = Answer(request.request_id, prompt, tokenizer, params, seed=seed)
                async for output in outputs:
                    response, ends_early = answer.extend(output)
                    if ends_early:
                        outputs.end(output.choice)
                    await context.write(response)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with _reporting(context):
            return inference_pb2.TokenizeResponse(
                token_ids=await self._prompts.encode("text", request.text)
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
            default_sampling_params=encode_defaults(model.defaults),
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
        decode: Callable[[list[int]], str] = self._prompts.require_tokenizer().decode
        return await asyncio.to_thread(decode, list(token_ids))


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
