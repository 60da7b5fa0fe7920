"""Between the engine's objects and the messages of engine.proto, for both ends of its stream.

K choices of requests, arrays little-endian and without padding.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import accumulate, chain, repeat
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos import common_pb2, engine_pb2
from runtime.arrays import INT32, UINT64, pack, unpack
from runtime.errors import InvalidRequestError
from runtime.live_requests import TokenBatch
from runtime.logprob_codec import decode_logprobs, encode_logprobs
from runtime.request import (
    FinishReason,
    ModelInfo,
    Request,
    RequestOutput,
    ResumedChoice,
)
from runtime.sampling_params import (
    DEFAULTED,
    CompleteParams,
    SamplingDefaults,
    SamplingParams,
    check_length,
)
from runtime.start_codec import decode_starts, encode_starts

PARAM_FIELDS = fields(CompleteParams)
NOT_FINISHED = common_pb2.FINISH_REASON_UNSPECIFIED
US_PER_S = 1_000_000


def encode_info(model: ModelInfo) -> engine_pb2.EngineInfo:
    return engine_pb2.EngineInfo(
        model=model.name,
        model_path=model.path,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        tp_size=model.tp_size,
        default_sampling_params=encode_defaults(model.defaults),
        fingerprint=model.fingerprint,
    )


def decode_info(message: engine_pb2.EngineInfo) -> ModelInfo:
    """Raises ValueError: a default is missing."""
    return ModelInfo(
        name=message.model,
        path=message.model_path,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        tp_size=message.tp_size,
        defaults=_decode_defaults(message.default_sampling_params),
        fingerprint=message.fingerprint,
    )


def encode_defaults(defaults: SamplingDefaults) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**asdict(defaults))


def _decode_defaults(message: common_pb2.SamplingParams) -> SamplingDefaults:
    for name in DEFAULTED:
        if not message.HasField(name):
            raise ValueError(
                f"default_sampling_params has no {name}: engine and frontends must be of the same "
                "version"
            )
    return SamplingDefaults(**{name: getattr(message, name) for name in DEFAULTED})


def encode_request(request: Request) -> engine_pb2.AddRequest:
    """The prompt's token ids must fit int32."""
    params = {field.name: getattr(request.params, field.name) for field in PARAM_FIELDS}
    params["seed"] = request.seed
    timeout_s = request.timeout_s
    return engine_pb2.AddRequest(
        request_id=request.request_id,
        prompt_token_ids=pack(INT32, request.prompt_token_ids),
        sampling_params=common_pb2.SamplingParams(**params),
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=request.tenant,
        timeout_us=None if timeout_s is None else max(0, int(timeout_s * US_PER_S)),
        bad_words=[engine_pb2.TokenIds(ids=pack(INT32, word)) for word in request.bad_words],
        resumed=[
            engine_pb2.ResumedChoice(
                token_ids=pack(INT32, each.token_ids), has_ended=each.has_ended
            )
            for each in request.resumed
        ],
        was_accepted=request.was_accepted,
    )


def decode_request(message: engine_pb2.AddRequest) -> Request:
    """Raises InvalidRequestError: an array is cut, a parameter out of range or left to defaults."""
    params = decode_complete(message.sampling_params)
    if params.seed is None:
        raise InvalidRequestError("seed is missing: the frontend must set it")
    try:
        prompt = unpack(INT32, "prompt_token_ids", message.prompt_token_ids)
        bad_words = tuple(tuple(unpack(INT32, "bad_words", each.ids)) for each in message.bad_words)
        resumed = tuple(
            ResumedChoice(tuple(unpack(INT32, "resumed", each.token_ids)), each.has_ended)
            for each in message.resumed
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    waits = message.HasField("timeout_us")
    return Request(
        request_id=message.request_id,
        prompt_token_ids=prompt,
        params=params,
        seed=params.seed,
        cache_salt=message.cache_salt,
        priority=message.priority,
        tenant=message.tenant,
        timeout_s=message.timeout_us / US_PER_S if waits else None,
        bad_words=bad_words,
        resumed=resumed,
        was_accepted=message.was_accepted,
    )


def decode_params(message: common_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidRequestError: a field is out of range, or newer than this server."""
    return SamplingParams(**_values_of(message))


def decode_complete(message: common_pb2.SamplingParams) -> CompleteParams:
    """Raises InvalidRequestError: as `decode_params`, or something is left to defaults."""
    values = _values_of(message)
    for name in DEFAULTED:
        if name not in values:
            raise InvalidRequestError(f"{name} is missing: the frontend must set it")
    return CompleteParams(**values)


def _values_of(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """The fields that are set."""
    refuse_unknown_fields("sampling_params", message)
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.is_repeated:
            check_length(field.name, len(value))
        if field.name == "logit_bias":
            values[field.name] = dict(value)
        else:
            values[field.name] = tuple(value) if field.is_repeated else value
    return values


def refuse_unknown_fields(name: str, message: Message) -> None:
    """Raises InvalidRequestError: a newer client asks for what this server would leave out."""
    unknown = UnknownFieldSet(message)
    numbers = sorted({unknown[index].field_number for index in range(len(unknown))})
    if numbers:
        raise InvalidRequestError(
            f"{name} has fields that this server doesn't know, numbers {numbers}: leave them unset"
        )


def encode_outputs(outputs: Sequence[RequestOutput]) -> engine_pb2.StepOutputs:
    """`outputs` has at least one."""
    columns = zip(*outputs, strict=True)
    request_ids, token_ids, reasons, indices, num_cached_tokens, logprobs, scores, starts = columns
    return engine_pb2.StepOutputs(
        request_ids=pack(UINT64, request_ids),
        num_tokens=pack(INT32, map(len, token_ids)),
        token_ids=pack(INT32, chain.from_iterable(token_ids)),
        finish_reasons=bytes([reason or NOT_FINISHED for reason in reasons]),
        indices=pack(INT32, indices),
        num_cached_tokens=pack(INT32, num_cached_tokens),
        logprobs=encode_logprobs(logprobs),
        prompt_logprobs=encode_logprobs(scores),
        starts=encode_starts(starts),
    )


def encode_tokens(batch: TokenBatch) -> engine_pb2.StepOutputs:
    """As `encode_outputs` of its outputs."""
    to = batch.recipients
    return engine_pb2.StepOutputs(
        request_ids=pack(UINT64, to.request_ids),
        num_tokens=pack(INT32, repeat(1, len(batch.token_ids))),
        token_ids=pack(INT32, batch.token_ids),
        finish_reasons=bytes([reason or NOT_FINISHED for reason in batch.reasons]),
        indices=pack(INT32, to.choices),
        num_cached_tokens=pack(INT32, to.num_cached_tokens),
    )


def decode_outputs(message: engine_pb2.StepOutputs) -> list[RequestOutput]:
    """Raises ValueError: the arrays don't fit together; the message names them and the numbers."""
    request_ids = unpack(UINT64, "request_ids", message.request_ids)
    counts = unpack(INT32, "num_tokens", message.num_tokens)
    reasons = message.finish_reasons
    indices = unpack(INT32, "indices", message.indices)
    num_cached_tokens = unpack(INT32, "num_cached_tokens", message.num_cached_tokens)
    token_ids = unpack(INT32, "token_ids", message.token_ids)
    columns = {
        "request_ids": request_ids,
        "num_tokens": counts,
        "finish_reasons": reasons,
        "indices": indices,
        "num_cached_tokens": num_cached_tokens,
    }
    if len({len(column) for column in columns.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise ValueError(f"columns must have as many values: {lengths}")
    if min(counts, default=0) < 0 or sum(counts) != len(token_ids):
        raise ValueError(f"num_tokens sum to {sum(counts)}, token_ids has {len(token_ids)} values")
    ends = accumulate(counts)
    outputs = [
        RequestOutput(
            request_id,
            tuple(token_ids[end - count : end]),
            None if reason == NOT_FINISHED else FinishReason(reason),
            index,
            num_cached,
        )
        for request_id, end, count, reason, index, num_cached in zip(
            request_ids, ends, counts, reasons, indices, num_cached_tokens, strict=True
        )
    ]
    if message.HasField("logprobs"):
        entries = decode_logprobs("logprobs", message.logprobs, len(outputs))
        pairs = zip(outputs, entries, strict=True)
        outputs = [output._replace(logprobs=each) for output, each in pairs]
    if message.HasField("prompt_logprobs"):
        entries = decode_logprobs("prompt_logprobs", message.prompt_logprobs, len(outputs))
        pairs = zip(outputs, entries, strict=True)
        outputs = [output._replace(scores=each) for output, each in pairs]
    if message.HasField("starts"):
        for row, start in decode_starts(message.starts, len(outputs)):
            outputs[row] = outputs[row]._replace(start=start)
    return outputs
