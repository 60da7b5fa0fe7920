from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrontendMessage(_message.Message):
    __slots__ = ("add", "abort", "stats")
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    add: AddRequest
    abort: AbortRequest
    stats: StatsRequest
    def __init__(self, add: _Optional[_Union[AddRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., stats: _Optional[_Union[StatsRequest, _Mapping]] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling_params", "cache_salt", "priority", "tenant", "timeout_us", "bad_words", "resumed", "was_accepted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    WAS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prompt_token_ids: bytes
    sampling_params: _common_pb2.SamplingParams
    cache_salt: str
    priority: int
    tenant: str
    timeout_us: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    resumed: _containers.RepeatedCompositeFieldContainer[ResumedChoice]
    was_accepted: bool
    def __init__(self, request_id: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., timeout_us: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., resumed: _Optional[_Iterable[_Union[ResumedChoice, _Mapping]]] = ..., was_accepted: _Optional[bool] = ...) -> None: ...

class ResumedChoice(_message.Message):
    __slots__ = ("token_ids", "has_ended")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    has_ended: bool
    def __init__(self, token_ids: _Optional[bytes] = ..., has_ended: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    def __init__(self, ids: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    index: int
    def __init__(self, request_id: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("info", "outputs", "stats", "failed", "draining", "readiness")
    INFO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    info: EngineInfo
    outputs: StepOutputs
    stats: _common_pb2.EngineStats
    failed: RequestFailed
    draining: EngineDraining
    readiness: EngineReadiness
    def __init__(self, info: _Optional[_Union[EngineInfo, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., stats: _Optional[_Union[_common_pb2.EngineStats, _Mapping]] = ..., failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., draining: _Optional[_Union[EngineDraining, _Mapping]] = ..., readiness: _Optional[_Union[EngineReadiness, _Mapping]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("model", "model_path", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "tp_size", "default_sampling_params", "fingerprint")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tp_size: int
    default_sampling_params: _common_pb2.SamplingParams
    fingerprint: str
    def __init__(self, model: _Optional[str] = ..., model_path: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tp_size: _Optional[int] = ..., default_sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class EngineDraining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineReadiness(_message.Message):
    __slots__ = ("is_ready", "reason")
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    is_ready: bool
    reason: str
    def __init__(self, is_ready: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("request_ids", "num_tokens", "token_ids", "finish_reasons", "indices", "num_cached_tokens", "logprobs", "prompt_logprobs", "starts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: bytes
    num_tokens: bytes
    token_ids: bytes
    finish_reasons: bytes
    indices: bytes
    num_cached_tokens: bytes
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    starts: Starts
    def __init__(self, request_ids: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., finish_reasons: _Optional[bytes] = ..., indices: _Optional[bytes] = ..., num_cached_tokens: _Optional[bytes] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., starts: _Optional[_Union[Starts, _Mapping]] = ...) -> None: ...

class Starts(_message.Message):
    __slots__ = ("rows", "queue_us", "prefill_us")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    queue_us: bytes
    prefill_us: bytes
    def __init__(self, rows: _Optional[bytes] = ..., queue_us: _Optional[bytes] = ..., prefill_us: _Optional[bytes] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("num_entries", "logprobs", "num_tops", "top_token_ids", "top_logprobs")
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOPS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_entries: bytes
    logprobs: bytes
    num_tops: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, num_entries: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., num_tops: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("request_id", "kind", "message", "retry_after_ms", "was_refused")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[RequestFailed.Kind]
        KIND_INVALID: _ClassVar[RequestFailed.Kind]
        KIND_CAPACITY: _ClassVar[RequestFailed.Kind]
        KIND_UNAVAILABLE: _ClassVar[RequestFailed.Kind]
        KIND_INTERNAL: _ClassVar[RequestFailed.Kind]
        KIND_DEADLINE: _ClassVar[RequestFailed.Kind]
        KIND_MODEL: _ClassVar[RequestFailed.Kind]
    KIND_UNSPECIFIED: RequestFailed.Kind
    KIND_INVALID: RequestFailed.Kind
    KIND_CAPACITY: RequestFailed.Kind
    KIND_UNAVAILABLE: RequestFailed.Kind
    KIND_INTERNAL: RequestFailed.Kind
    KIND_DEADLINE: RequestFailed.Kind
    KIND_MODEL: RequestFailed.Kind
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    WAS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    kind: RequestFailed.Kind
    message: str
    retry_after_ms: int
    was_refused: bool
    def __init__(self, request_id: _Optional[int] = ..., kind: _Optional[_Union[RequestFailed.Kind, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., was_refused: _Optional[bool] = ...) -> None: ...
