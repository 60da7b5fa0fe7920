from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseRenewal(_message.Message):
    __slots__ = ("epoch", "number", "lease_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    lease_ms: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class ListenRequest(_message.Message):
    __slots__ = ("epoch", "host", "interface", "device")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    host: str
    interface: str
    device: str
    def __init__(self, epoch: _Optional[int] = ..., host: _Optional[str] = ..., interface: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class ListenReply(_message.Message):
    __slots__ = ("interface", "address", "port")
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    interface: str
    address: str
    port: int
    def __init__(self, interface: _Optional[str] = ..., address: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class ReachRequest(_message.Message):
    __slots__ = ("epoch", "endpoints", "timeout_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    timeout_ms: int
    def __init__(self, epoch: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("host", "port")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class ReachReply(_message.Message):
    __slots__ = ("faults",)
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    faults: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, faults: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenRendezvousRequest(_message.Message):
    __slots__ = ("epoch", "world_size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    world_size: int
    def __init__(self, epoch: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class OpenRendezvousReply(_message.Message):
    __slots__ = ("port",)
    PORT_FIELD_NUMBER: _ClassVar[int]
    port: int
    def __init__(self, port: _Optional[int] = ...) -> None: ...

class InitializeRequest(_message.Message):
    __slots__ = ("epoch", "rank", "tp_size", "rendezvous_host", "rendezvous_port", "model_path", "dtype", "device", "attention", "num_threads", "local_world_size", "max_num_batched_tokens", "max_num_seqs", "max_num_scored_tokens", "gpu_memory_fraction", "enforce_eager", "collective_timeout_s", "deterministic", "quantization", "kv_cache_dtype", "interface", "address")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_HOST_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_PORT_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    ENFORCE_EAGER_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    tp_size: int
    rendezvous_host: str
    rendezvous_port: int
    model_path: str
    dtype: str
    device: str
    attention: str
    num_threads: int
    local_world_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_scored_tokens: int
    gpu_memory_fraction: float
    enforce_eager: bool
    collective_timeout_s: float
    deterministic: bool
    quantization: str
    kv_cache_dtype: str
    interface: str
    address: str
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., rendezvous_host: _Optional[str] = ..., rendezvous_port: _Optional[int] = ..., model_path: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., attention: _Optional[str] = ..., num_threads: _Optional[int] = ..., local_world_size: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_scored_tokens: _Optional[int] = ..., gpu_memory_fraction: _Optional[float] = ..., enforce_eager: _Optional[bool] = ..., collective_timeout_s: _Optional[float] = ..., deterministic: _Optional[bool] = ..., quantization: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., interface: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class InitializeReply(_message.Message):
    __slots__ = ("progress", "spec")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    progress: LoadProgress
    spec: ModelSpec
    def __init__(self, progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., spec: _Optional[_Union[ModelSpec, _Mapping]] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("loaded_bytes", "total_bytes")
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    loaded_bytes: int
    total_bytes: int
    def __init__(self, loaded_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("architecture", "vocab_size", "max_model_len", "eos_token_ids", "layers", "available_memory_bytes", "block_size_multiple", "parameter_bytes", "attention")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerCacheSpec]
    available_memory_bytes: int
    block_size_multiple: int
    parameter_bytes: int
    attention: str
    def __init__(self, architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[_Union[LayerCacheSpec, _Mapping]]] = ..., available_memory_bytes: _Optional[int] = ..., block_size_multiple: _Optional[int] = ..., parameter_bytes: _Optional[int] = ..., attention: _Optional[str] = ...) -> None: ...

class LayerCacheSpec(_message.Message):
    __slots__ = ("window", "num_kv_heads", "k_dim", "v_dim", "element_bytes", "chunk")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    K_DIM_FIELD_NUMBER: _ClassVar[int]
    V_DIM_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    window: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    element_bytes: int
    chunk: int
    def __init__(self, window: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., k_dim: _Optional[int] = ..., v_dim: _Optional[int] = ..., element_bytes: _Optional[int] = ..., chunk: _Optional[int] = ...) -> None: ...

class AllocateCacheRequest(_message.Message):
    __slots__ = ("epoch", "block_size", "num_blocks", "groups")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    block_size: int
    num_blocks: int
    groups: _containers.RepeatedCompositeFieldContainer[CacheGroup]
    def __init__(self, epoch: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[CacheGroup, _Mapping]]] = ...) -> None: ...

class CacheGroup(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[int]] = ...) -> None: ...

class AllocateCacheReply(_message.Message):
    __slots__ = ("cache_bytes", "progress")
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    cache_bytes: int
    progress: CaptureProgress
    def __init__(self, cache_bytes: _Optional[int] = ..., progress: _Optional[_Union[CaptureProgress, _Mapping]] = ...) -> None: ...

class CaptureProgress(_message.Message):
    __slots__ = ("captured", "total")
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    captured: int
    total: int
    def __init__(self, captured: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("epoch", "step_id", "return_input_hash", "plan", "delta", "sample", "sampler_inputs", "share_samples", "checked_plan")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RETURN_INPUT_HASH_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_INPUTS_FIELD_NUMBER: _ClassVar[int]
    SHARE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CHECKED_PLAN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    return_input_hash: bool
    plan: StepPlan
    delta: StepDelta
    sample: SampleStep
    sampler_inputs: SamplerInputs
    share_samples: bool
    checked_plan: StepPlan
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., return_input_hash: _Optional[bool] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., delta: _Optional[_Union[StepDelta, _Mapping]] = ..., sample: _Optional[_Union[SampleStep, _Mapping]] = ..., sampler_inputs: _Optional[_Union[SamplerInputs, _Mapping]] = ..., share_samples: _Optional[bool] = ..., checked_plan: _Optional[_Union[StepPlan, _Mapping]] = ...) -> None: ...

class SampleStep(_message.Message):
    __slots__ = ("masks", "sampler_inputs")
    MASKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_INPUTS_FIELD_NUMBER: _ClassVar[int]
    masks: TokenMasks
    sampler_inputs: SamplerInputs
    def __init__(self, masks: _Optional[_Union[TokenMasks, _Mapping]] = ..., sampler_inputs: _Optional[_Union[SamplerInputs, _Mapping]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("input_ids", "positions", "sequence_ids", "seq_lens", "query_lens", "block_tables", "sample_index", "sample_sequence", "sampling", "block_ops", "token_references", "defer_sampling", "score_index", "score_token_ids", "score_num_tops")
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_LENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REFERENCES_FIELD_NUMBER: _ClassVar[int]
    DEFER_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCORE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_NUM_TOPS_FIELD_NUMBER: _ClassVar[int]
    input_ids: bytes
    positions: bytes
    sequence_ids: bytes
    seq_lens: bytes
    query_lens: bytes
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTables]
    sample_index: bytes
    sample_sequence: bytes
    sampling: SamplingColumns
    block_ops: _containers.RepeatedCompositeFieldContainer[BlockOp]
    token_references: TokenReferences
    defer_sampling: bool
    score_index: bytes
    score_token_ids: bytes
    score_num_tops: bytes
    def __init__(self, input_ids: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., sequence_ids: _Optional[bytes] = ..., seq_lens: _Optional[bytes] = ..., query_lens: _Optional[bytes] = ..., block_tables: _Optional[_Iterable[_Union[BlockTables, _Mapping]]] = ..., sample_index: _Optional[bytes] = ..., sample_sequence: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingColumns, _Mapping]] = ..., block_ops: _Optional[_Iterable[_Union[BlockOp, _Mapping]]] = ..., token_references: _Optional[_Union[TokenReferences, _Mapping]] = ..., defer_sampling: _Optional[bool] = ..., score_index: _Optional[bytes] = ..., score_token_ids: _Optional[bytes] = ..., score_num_tops: _Optional[bytes] = ...) -> None: ...

class StepDelta(_message.Message):
    __slots__ = ("is_keyframe", "removed", "added", "added_ids", "added_sampling", "changed", "table_changes", "left", "joined", "joined_seq_lens", "steady_ids", "steady_samples", "rows", "seq_lens", "query_lens", "samples", "input_ids", "block_ops", "defer_sampling", "score_index", "score_token_ids", "score_num_tops")
    IS_KEYFRAME_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    ADDED_IDS_FIELD_NUMBER: _ClassVar[int]
    ADDED_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    TABLE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    JOINED_SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    STEADY_IDS_FIELD_NUMBER: _ClassVar[int]
    STEADY_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_LENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OPS_FIELD_NUMBER: _ClassVar[int]
    DEFER_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCORE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_NUM_TOPS_FIELD_NUMBER: _ClassVar[int]
    is_keyframe: bool
    removed: bytes
    added: bytes
    added_ids: bytes
    added_sampling: SamplingColumns
    changed: bytes
    table_changes: _containers.RepeatedCompositeFieldContainer[TableChanges]
    left: bytes
    joined: bytes
    joined_seq_lens: bytes
    steady_ids: bytes
    steady_samples: bytes
    rows: bytes
    seq_lens: bytes
    query_lens: bytes
    samples: bytes
    input_ids: bytes
    block_ops: _containers.RepeatedCompositeFieldContainer[BlockOp]
    defer_sampling: bool
    score_index: bytes
    score_token_ids: bytes
    score_num_tops: bytes
    def __init__(self, is_keyframe: _Optional[bool] = ..., removed: _Optional[bytes] = ..., added: _Optional[bytes] = ..., added_ids: _Optional[bytes] = ..., added_sampling: _Optional[_Union[SamplingColumns, _Mapping]] = ..., changed: _Optional[bytes] = ..., table_changes: _Optional[_Iterable[_Union[TableChanges, _Mapping]]] = ..., left: _Optional[bytes] = ..., joined: _Optional[bytes] = ..., joined_seq_lens: _Optional[bytes] = ..., steady_ids: _Optional[bytes] = ..., steady_samples: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., seq_lens: _Optional[bytes] = ..., query_lens: _Optional[bytes] = ..., samples: _Optional[bytes] = ..., input_ids: _Optional[bytes] = ..., block_ops: _Optional[_Iterable[_Union[BlockOp, _Mapping]]] = ..., defer_sampling: _Optional[bool] = ..., score_index: _Optional[bytes] = ..., score_token_ids: _Optional[bytes] = ..., score_num_tops: _Optional[bytes] = ...) -> None: ...

class TableChanges(_message.Message):
    __slots__ = ("first_blocks", "num_blocks", "block_ids")
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    first_blocks: bytes
    num_blocks: bytes
    block_ids: bytes
    def __init__(self, first_blocks: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class SamplerInputs(_message.Message):
    __slots__ = ("biases", "masks", "bad_words", "history")
    BIASES_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    biases: TokenBiases
    masks: TokenMasks
    bad_words: BadWords
    history: TokenHistory
    def __init__(self, biases: _Optional[_Union[TokenBiases, _Mapping]] = ..., masks: _Optional[_Union[TokenMasks, _Mapping]] = ..., bad_words: _Optional[_Union[BadWords, _Mapping]] = ..., history: _Optional[_Union[TokenHistory, _Mapping]] = ...) -> None: ...

class TokenBiases(_message.Message):
    __slots__ = ("rows", "token_ids", "values")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    token_ids: bytes
    values: bytes
    def __init__(self, rows: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class TokenMasks(_message.Message):
    __slots__ = ("rows", "kinds", "num_words", "words")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[TokenMasks.Kind]
        KIND_ALLOWED: _ClassVar[TokenMasks.Kind]
        KIND_FORBIDDEN: _ClassVar[TokenMasks.Kind]
        KIND_BITS: _ClassVar[TokenMasks.Kind]
    KIND_UNSPECIFIED: TokenMasks.Kind
    KIND_ALLOWED: TokenMasks.Kind
    KIND_FORBIDDEN: TokenMasks.Kind
    KIND_BITS: TokenMasks.Kind
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORDS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    kinds: bytes
    num_words: bytes
    words: bytes
    def __init__(self, rows: _Optional[bytes] = ..., kinds: _Optional[bytes] = ..., num_words: _Optional[bytes] = ..., words: _Optional[bytes] = ...) -> None: ...

class BadWords(_message.Message):
    __slots__ = ("rows", "lengths", "token_ids")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    lengths: bytes
    token_ids: bytes
    def __init__(self, rows: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class TokenHistory(_message.Message):
    __slots__ = ("rows", "lengths", "num_prompt_tokens", "token_ids")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    lengths: bytes
    num_prompt_tokens: bytes
    token_ids: bytes
    def __init__(self, rows: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., num_prompt_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class BlockTables(_message.Message):
    __slots__ = ("num_blocks", "block_ids", "first_blocks")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: bytes
    block_ids: bytes
    first_blocks: bytes
    def __init__(self, num_blocks: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., first_blocks: _Optional[bytes] = ...) -> None: ...

class SamplingColumns(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "min_length", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "num_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: bytes
    top_k: bytes
    top_p: bytes
    seed: bytes
    min_length: bytes
    min_p: bytes
    presence_penalty: bytes
    frequency_penalty: bytes
    repetition_penalty: bytes
    num_logprobs: bytes
    def __init__(self, temperature: _Optional[bytes] = ..., top_k: _Optional[bytes] = ..., top_p: _Optional[bytes] = ..., seed: _Optional[bytes] = ..., min_length: _Optional[bytes] = ..., min_p: _Optional[bytes] = ..., presence_penalty: _Optional[bytes] = ..., frequency_penalty: _Optional[bytes] = ..., repetition_penalty: _Optional[bytes] = ..., num_logprobs: _Optional[bytes] = ...) -> None: ...

class BlockOp(_message.Message):
    __slots__ = ("kind", "source_block", "target_block")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[BlockOp.Kind]
        KIND_COPY: _ClassVar[BlockOp.Kind]
    KIND_UNSPECIFIED: BlockOp.Kind
    KIND_COPY: BlockOp.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TARGET_BLOCK_FIELD_NUMBER: _ClassVar[int]
    kind: BlockOp.Kind
    source_block: int
    target_block: int
    def __init__(self, kind: _Optional[_Union[BlockOp.Kind, str]] = ..., source_block: _Optional[int] = ..., target_block: _Optional[int] = ...) -> None: ...

class TokenReferences(_message.Message):
    __slots__ = ("rows", "step_ids", "sample_rows")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    step_ids: bytes
    sample_rows: bytes
    def __init__(self, rows: _Optional[bytes] = ..., step_ids: _Optional[bytes] = ..., sample_rows: _Optional[bytes] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("epoch", "step_id", "result", "timings", "input_hash")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    INPUT_HASH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    result: StepResult
    timings: StepTimings
    input_hash: int
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., input_hash: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("sequence_ids", "num_tokens", "token_ids", "logprobs", "scores", "fault_rows", "faults")
    class Fault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FAULT_UNSPECIFIED: _ClassVar[StepResult.Fault]
        FAULT_INVALID_LOGITS: _ClassVar[StepResult.Fault]
        FAULT_EMPTY_SUPPORT: _ClassVar[StepResult.Fault]
    FAULT_UNSPECIFIED: StepResult.Fault
    FAULT_INVALID_LOGITS: StepResult.Fault
    FAULT_EMPTY_SUPPORT: StepResult.Fault
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    FAULT_ROWS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    num_tokens: bytes
    token_ids: bytes
    logprobs: Logprobs
    scores: Logprobs
    fault_rows: bytes
    faults: bytes
    def __init__(self, sequence_ids: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., scores: _Optional[_Union[Logprobs, _Mapping]] = ..., fault_rows: _Optional[bytes] = ..., faults: _Optional[bytes] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("rows", "logprobs", "num_tops", "top_token_ids", "top_logprobs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOPS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    logprobs: bytes
    num_tops: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, rows: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., num_tops: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("prepare_us", "forward_us", "sample_us")
    PREPARE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    prepare_us: int
    forward_us: int
    sample_us: int
    def __init__(self, prepare_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., sample_us: _Optional[int] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ShutdownReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
