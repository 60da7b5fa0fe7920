from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos", "n", "min_tokens", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "logprobs", "prompt_logprobs", "json_schema", "regex", "grammar", "choices")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool
    n: int
    min_tokens: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int
    prompt_logprobs: int
    json_schema: str
    regex: str
    grammar: str
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., min_tokens: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choices: _Optional[_Iterable[str]] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("num_steps", "num_scheduled_tokens", "num_scheduled_sequences", "num_output_tokens", "num_preemptions", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_prompt_tokens", "num_cached_tokens", "num_refused", "num_timed_out", "num_invalid_logits", "num_empty_supports", "num_finished_stop", "num_finished_length", "num_finished_abort", "max_num_seqs", "max_num_batched_tokens", "queue_s", "ttft_s", "e2e_s", "itl_s", "prompt_tokens", "output_tokens", "step_s", "last_step", "ranks", "epoch")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_INVALID_LOGITS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMPTY_SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_ABORT_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_scheduled_tokens: int
    num_scheduled_sequences: int
    num_output_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_refused: int
    num_timed_out: int
    num_invalid_logits: int
    num_empty_supports: int
    num_finished_stop: int
    num_finished_length: int
    num_finished_abort: int
    max_num_seqs: int
    max_num_batched_tokens: int
    queue_s: Histogram
    ttft_s: Histogram
    e2e_s: Histogram
    itl_s: Histogram
    prompt_tokens: Histogram
    output_tokens: Histogram
    step_s: StepSeconds
    last_step: StepSummary
    ranks: _containers.RepeatedCompositeFieldContainer[RankSummary]
    epoch: int
    def __init__(self, num_steps: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ..., num_scheduled_sequences: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_timed_out: _Optional[int] = ..., num_invalid_logits: _Optional[int] = ..., num_empty_supports: _Optional[int] = ..., num_finished_stop: _Optional[int] = ..., num_finished_length: _Optional[int] = ..., num_finished_abort: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., queue_s: _Optional[_Union[Histogram, _Mapping]] = ..., ttft_s: _Optional[_Union[Histogram, _Mapping]] = ..., e2e_s: _Optional[_Union[Histogram, _Mapping]] = ..., itl_s: _Optional[_Union[Histogram, _Mapping]] = ..., prompt_tokens: _Optional[_Union[Histogram, _Mapping]] = ..., output_tokens: _Optional[_Union[Histogram, _Mapping]] = ..., step_s: _Optional[_Union[StepSeconds, _Mapping]] = ..., last_step: _Optional[_Union[StepSummary, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankSummary, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class StepSeconds(_message.Message):
    __slots__ = ("schedule", "encode", "wire", "forward", "sample", "publish", "total")
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    schedule: Histogram
    encode: Histogram
    wire: Histogram
    forward: Histogram
    sample: Histogram
    publish: Histogram
    total: Histogram
    def __init__(self, schedule: _Optional[_Union[Histogram, _Mapping]] = ..., encode: _Optional[_Union[Histogram, _Mapping]] = ..., wire: _Optional[_Union[Histogram, _Mapping]] = ..., forward: _Optional[_Union[Histogram, _Mapping]] = ..., sample: _Optional[_Union[Histogram, _Mapping]] = ..., publish: _Optional[_Union[Histogram, _Mapping]] = ..., total: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class StepSummary(_message.Message):
    __slots__ = ("step_id", "num_decode_sequences", "num_prefill_sequences", "num_prefill_tokens", "total_s")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    num_decode_sequences: int
    num_prefill_sequences: int
    num_prefill_tokens: int
    total_s: float
    def __init__(self, step_id: _Optional[int] = ..., num_decode_sequences: _Optional[int] = ..., num_prefill_sequences: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., total_s: _Optional[float] = ...) -> None: ...

class RankSummary(_message.Message):
    __slots__ = ("rank", "prepare_s", "forward_s", "sample_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    prepare_s: float
    forward_s: float
    sample_s: float
    def __init__(self, rank: _Optional[int] = ..., prepare_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., sample_s: _Optional[float] = ...) -> None: ...
