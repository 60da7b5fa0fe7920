from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Record(_message.Message):
    __slots__ = ("header", "arrival", "abort", "decision", "result", "restart", "expiry", "plan", "state", "full_plan", "late_inputs", "contents")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FULL_PLAN_FIELD_NUMBER: _ClassVar[int]
    LATE_INPUTS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    arrival: Arrival
    abort: Abort
    decision: Decision
    result: Result
    restart: Restart
    expiry: Expiry
    plan: Plan
    state: SchedulerState
    full_plan: FullPlan
    late_inputs: LateInputs
    contents: CacheContents
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., arrival: _Optional[_Union[Arrival, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., restart: _Optional[_Union[Restart, _Mapping]] = ..., expiry: _Optional[_Union[Expiry, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., state: _Optional[_Union[SchedulerState, _Mapping]] = ..., full_plan: _Optional[_Union[FullPlan, _Mapping]] = ..., late_inputs: _Optional[_Union[LateInputs, _Mapping]] = ..., contents: _Optional[_Union[CacheContents, _Mapping]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("format", "run", "number", "redacted", "has_steps", "unix_s", "clock_s", "setup", "model", "fingerprint", "depth", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REDACTED_FIELD_NUMBER: _ClassVar[int]
    HAS_STEPS_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    SETUP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    format: int
    run: str
    number: int
    redacted: bool
    has_steps: bool
    unix_s: float
    clock_s: float
    setup: SchedulerSetup
    model: str
    fingerprint: str
    depth: int
    options: _containers.ScalarMap[str, str]
    def __init__(self, format: _Optional[int] = ..., run: _Optional[str] = ..., number: _Optional[int] = ..., redacted: _Optional[bool] = ..., has_steps: _Optional[bool] = ..., unix_s: _Optional[float] = ..., clock_s: _Optional[float] = ..., setup: _Optional[_Union[SchedulerSetup, _Mapping]] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., depth: _Optional[int] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SchedulerSetup(_message.Message):
    __slots__ = ("block_size", "num_blocks", "block_bytes", "groups", "policy", "priority_ageing_s", "prefix_cache", "root", "eos_token_ids", "vocab_size", "max_num_batched_tokens", "max_chunk_tokens", "max_num_seqs", "max_model_len", "watermark", "max_num_partial_prefills", "max_num_scored_tokens", "max_queued_requests", "max_queued_tokens", "queue_timeout_s")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_AGEING_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_PARTIAL_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    num_blocks: int
    block_bytes: int
    groups: _containers.RepeatedCompositeFieldContainer[CacheGroup]
    policy: str
    priority_ageing_s: float
    prefix_cache: bool
    root: bytes
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    vocab_size: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    max_num_seqs: int
    max_model_len: int
    watermark: float
    max_num_partial_prefills: int
    max_num_scored_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    queue_timeout_s: float
    def __init__(self, block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[CacheGroup, _Mapping]]] = ..., policy: _Optional[str] = ..., priority_ageing_s: _Optional[float] = ..., prefix_cache: _Optional[bool] = ..., root: _Optional[bytes] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., vocab_size: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_chunk_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., watermark: _Optional[float] = ..., max_num_partial_prefills: _Optional[int] = ..., max_num_scored_tokens: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., queue_timeout_s: _Optional[float] = ...) -> None: ...

class CacheGroup(_message.Message):
    __slots__ = ("layers", "window", "chunk", "max_blocks")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    window: int
    chunk: int
    max_blocks: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., window: _Optional[int] = ..., chunk: _Optional[int] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("now", "sequence_id", "num_prompt_tokens", "token_ids", "num_tokens", "params", "seed", "cache_salt", "priority", "tenant", "deadline_s", "submitted_s", "bad_words", "is_resumed", "num_scored_tokens", "forks")
    NOW_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_S_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    IS_RESUMED_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    now: float
    sequence_id: int
    num_prompt_tokens: int
    token_ids: bytes
    num_tokens: int
    params: _common_pb2.SamplingParams
    seed: int
    cache_salt: str
    priority: int
    tenant: str
    deadline_s: float
    submitted_s: float
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    is_resumed: bool
    num_scored_tokens: int
    forks: _containers.RepeatedCompositeFieldContainer[Fork]
    def __init__(self, now: _Optional[float] = ..., sequence_id: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., deadline_s: _Optional[float] = ..., submitted_s: _Optional[float] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., is_resumed: _Optional[bool] = ..., num_scored_tokens: _Optional[int] = ..., forks: _Optional[_Iterable[_Union[Fork, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    def __init__(self, ids: _Optional[bytes] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("sequence_id", "seed")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    seed: int
    def __init__(self, sequence_id: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("now", "sequence_id", "reason")
    NOW_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    now: float
    sequence_id: int
    reason: int
    def __init__(self, now: _Optional[float] = ..., sequence_id: _Optional[int] = ..., reason: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("now", "step_id", "removed", "added", "changed", "copies")
    NOW_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    now: float
    step_id: int
    removed: _containers.RepeatedScalarFieldContainer[int]
    added: _containers.RepeatedScalarFieldContainer[int]
    changed: _containers.RepeatedCompositeFieldContainer[TableChange]
    copies: bytes
    def __init__(self, now: _Optional[float] = ..., step_id: _Optional[int] = ..., removed: _Optional[_Iterable[int]] = ..., added: _Optional[_Iterable[int]] = ..., changed: _Optional[_Iterable[_Union[TableChange, _Mapping]]] = ..., copies: _Optional[bytes] = ...) -> None: ...

class TableChange(_message.Message):
    __slots__ = ("sequence_id", "first_blocks", "appended")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    first_blocks: _containers.RepeatedScalarFieldContainer[int]
    appended: _containers.RepeatedCompositeFieldContainer[Blocks]
    def __init__(self, sequence_id: _Optional[int] = ..., first_blocks: _Optional[_Iterable[int]] = ..., appended: _Optional[_Iterable[_Union[Blocks, _Mapping]]] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("step_id", "sequence_ids", "seq_lens", "query_lens", "input_ids", "num_tokens", "num_samples", "tokens_digest", "sampling_digest", "submitted_s")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_LENS_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_S_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sequence_ids: bytes
    seq_lens: bytes
    query_lens: bytes
    input_ids: bytes
    num_tokens: int
    num_samples: int
    tokens_digest: bytes
    sampling_digest: bytes
    submitted_s: float
    def __init__(self, step_id: _Optional[int] = ..., sequence_ids: _Optional[bytes] = ..., seq_lens: _Optional[bytes] = ..., query_lens: _Optional[bytes] = ..., input_ids: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., num_samples: _Optional[int] = ..., tokens_digest: _Optional[bytes] = ..., sampling_digest: _Optional[bytes] = ..., submitted_s: _Optional[float] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("now", "step_id", "token_ids", "num_samples", "fault_rows", "faults", "num_scores", "bad_scores", "finished", "encode_s", "ranks")
    NOW_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAULT_ROWS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORES_FIELD_NUMBER: _ClassVar[int]
    BAD_SCORES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    now: float
    step_id: int
    token_ids: bytes
    num_samples: int
    fault_rows: bytes
    faults: bytes
    num_scores: int
    bad_scores: bytes
    finished: _containers.RepeatedScalarFieldContainer[int]
    encode_s: float
    ranks: _containers.RepeatedCompositeFieldContainer[RankTimes]
    def __init__(self, now: _Optional[float] = ..., step_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_samples: _Optional[int] = ..., fault_rows: _Optional[bytes] = ..., faults: _Optional[bytes] = ..., num_scores: _Optional[int] = ..., bad_scores: _Optional[bytes] = ..., finished: _Optional[_Iterable[int]] = ..., encode_s: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[RankTimes, _Mapping]]] = ...) -> None: ...

class RankTimes(_message.Message):
    __slots__ = ("prepare_s", "forward_s", "sample_s")
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    prepare_s: float
    forward_s: float
    sample_s: float
    def __init__(self, prepare_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., sample_s: _Optional[float] = ...) -> None: ...

class Expiry(_message.Message):
    __slots__ = ("now",)
    NOW_FIELD_NUMBER: _ClassVar[int]
    now: float
    def __init__(self, now: _Optional[float] = ...) -> None: ...

class Restart(_message.Message):
    __slots__ = ("is_outside",)
    IS_OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    is_outside: bool
    def __init__(self, is_outside: _Optional[bool] = ...) -> None: ...

class SchedulerState(_message.Message):
    __slots__ = ("num_arrivals", "last_step_id", "updated_at", "step_seconds", "last_token_s", "mean_wait_s", "is_backed_up", "removed", "empty_blocks", "cached_first_blocks", "cached_blocks", "nodes")
    NUM_ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    IS_BACKED_UP_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    EMPTY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    num_arrivals: int
    last_step_id: int
    updated_at: float
    step_seconds: _containers.RepeatedScalarFieldContainer[float]
    last_token_s: float
    mean_wait_s: float
    is_backed_up: bool
    removed: _containers.RepeatedScalarFieldContainer[int]
    empty_blocks: _containers.RepeatedScalarFieldContainer[int]
    cached_first_blocks: _containers.RepeatedScalarFieldContainer[int]
    cached_blocks: _containers.RepeatedScalarFieldContainer[int]
    nodes: _containers.RepeatedCompositeFieldContainer[PrefixNode]
    def __init__(self, num_arrivals: _Optional[int] = ..., last_step_id: _Optional[int] = ..., updated_at: _Optional[float] = ..., step_seconds: _Optional[_Iterable[float]] = ..., last_token_s: _Optional[float] = ..., mean_wait_s: _Optional[float] = ..., is_backed_up: _Optional[bool] = ..., removed: _Optional[_Iterable[int]] = ..., empty_blocks: _Optional[_Iterable[int]] = ..., cached_first_blocks: _Optional[_Iterable[int]] = ..., cached_blocks: _Optional[_Iterable[int]] = ..., nodes: _Optional[_Iterable[_Union[PrefixNode, _Mapping]]] = ...) -> None: ...

class PrefixNode(_message.Message):
    __slots__ = ("parent", "salt", "tokens", "digest", "blocks")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    parent: int
    salt: str
    tokens: bytes
    digest: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, parent: _Optional[int] = ..., salt: _Optional[str] = ..., tokens: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class FullPlan(_message.Message):
    __slots__ = ("step_id", "defer_sampling", "arrays")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DEFER_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    defer_sampling: bool
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    def __init__(self, step_id: _Optional[int] = ..., defer_sampling: _Optional[bool] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ...) -> None: ...

class LateInputs(_message.Message):
    __slots__ = ("step_id", "arrays")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    def __init__(self, step_id: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("name", "dtype", "shape", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class CacheContents(_message.Message):
    __slots__ = ("texts", "blocks", "samples")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedCompositeFieldContainer[Text]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockContents]
    samples: _containers.RepeatedCompositeFieldContainer[Samples]
    def __init__(self, texts: _Optional[_Iterable[_Union[Text, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockContents, _Mapping]]] = ..., samples: _Optional[_Iterable[_Union[Samples, _Mapping]]] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("sequence_id", "token_ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class BlockContents(_message.Message):
    __slots__ = ("block", "group", "text", "place")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    block: int
    group: int
    text: int
    place: int
    def __init__(self, block: _Optional[int] = ..., group: _Optional[int] = ..., text: _Optional[int] = ..., place: _Optional[int] = ...) -> None: ...

class Samples(_message.Message):
    __slots__ = ("step_id", "sequence_ids", "places", "token_ids")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sequence_ids: bytes
    places: bytes
    token_ids: bytes
    def __init__(self, step_id: _Optional[int] = ..., sequence_ids: _Optional[bytes] = ..., places: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...
