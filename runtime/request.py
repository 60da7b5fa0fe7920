"""What the engine is asked for and what it answers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from runtime.errors import InvalidRequestError, LockstepError
from runtime.histogram import HistogramSnapshot
from runtime.sampling_params import (
    LOCKSTEP_DEFAULTS,
    CompleteParams,
    SamplingDefaults,
    SamplingParams,
)

# Few classes: each has a queue, and all queues are looked at for each admission.
MAX_PRIORITY = 10


class FinishReason(IntEnum):
    """Why a request ended; the numbers are those of the wire."""

    STOP = 1
    LENGTH = 2
    ABORT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the served model is and how far it reaches."""

    name: str
    path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tp_size: int
    defaults: SamplingDefaults = LOCKSTEP_DEFAULTS  # of what a request leaves unset
    fingerprint: str = ""  # engines with the same give the same tokens

    def complete(self, params: SamplingParams, *, num_prompt_tokens: int) -> CompleteParams:
        """With the model's defaults for what is unset.

        That of max_tokens is cut to what the prompt leaves of max_model_len.
        Raises InvalidRequestError: the prompt leaves too little where max_tokens is unset, or a
        field doesn't go with one of the defaults.
        """
        left, least = self.max_model_len - num_prompt_tokens, max(params.min_tokens, 1)
        if params.max_tokens is None and least > self.defaults.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} must be at least 0 and at most "
                f"max_tokens={self.defaults.max_tokens}, the default of what is unset"
            )
        if params.max_tokens is None and least > left:
            raise InvalidRequestError(
                f"prompt of {num_prompt_tokens} tokens + at least {least} new is "
                f"{num_prompt_tokens + least} tokens: more than max_model_len={self.max_model_len}"
            )
        max_tokens = max(min(self.defaults.max_tokens, left), 1)
        return params.complete(replace(self.defaults, max_tokens=max_tokens))


class ResumedChoice(NamedTuple):
    """What there is of a choice that another engine has begun."""

    token_ids: tuple[int, ...] = ()
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue.

    `request_id` is the engine's key, never a client's; `seed` is resolved.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    params: CompleteParams
    seed: int
    bad_words: tuple[tuple[int, ...], ...] = ()  # those of `params`, as tokens
    cache_salt: str = ""  # cached prefixes are shared within one salt
    priority: int = 0  # lower is more urgent
    tenant: str = ""  # who is charged
    timeout_s: float | None = None  # that the client still waits
    resumed: tuple[ResumedChoice, ...] = ()  # of every choice, or of none
    was_accepted: bool = False  # by an engine, before: limits of the queue don't apply

    def check(self, model: ModelInfo) -> None:
        """Raises InvalidRequestError where the request can't be served by `model`."""
        prompt = self.prompt_token_ids
        if len(prompt) == 0:
            raise InvalidRequestError("prompt is empty: it must have at least 1 token")
        total = len(prompt) + self.params.max_tokens
        if total > model.max_model_len:
            raise InvalidRequestError(
                f"prompt of {len(prompt)} tokens + max_tokens={self.params.max_tokens} is {total} "
                f"tokens: more than max_model_len={model.max_model_len}"
            )
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority={self.priority} must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]"
            )
        structure = self.params.structure
        if structure is not None and not model.eos_token_ids:
            raise InvalidRequestError(
                f"{structure.kind} is set, and the model has no end-of-sequence token with which "
                "a complete output could end"
            )
        self._check_ids("prompt token id", prompt, model)
        self._check_ids("logit_bias token id", self.params.logit_bias or (), model)
        self._check_ids("allowed_token_ids", self.params.allowed_token_ids, model)
        self._check_ids("stop_token_ids", self.params.stop_token_ids, model)
        for word in self.bad_words:
            self._check_ids("bad_words token id", word, model)
        self._check_resumed(model)

    def _check_resumed(self, model: ModelInfo) -> None:
        resumed, most = self.resumed, self.params.max_tokens
        if not resumed:
            return
        if len(resumed) != self.params.n:
            raise InvalidRequestError(
                f"resumed has {len(resumed)} entries: it must have n={self.params.n}, one for each "
                "choice, or none"
            )
        if all(each.has_ended for each in resumed):
            raise InvalidRequestError("resumed: all choices have ended, so that nothing is left")
        for index, each in enumerate(resumed):
            self._check_ids(f"resumed[{index}] token id", each.token_ids, model)
            if len(each.token_ids) >= most and not each.has_ended:
                raise InvalidRequestError(
                    f"resumed[{index}] has {len(each.token_ids)} tokens and hasn't ended: it must "
                    f"have fewer than max_tokens={most}"
                )

    def _check_ids(self, name: str, token_ids: Collection[int], model: ModelInfo) -> None:
        for extreme in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= extreme < model.vocab_size:
                raise InvalidRequestError(
                    f"{name} {extreme} must be in [0, {model.vocab_size}), the vocabulary"
                )


class TokenLogprobs(NamedTuple):
    """Log probabilities of one token and of the most probable ones, by the model alone.

    -9999 stands for a probability of 0.
    """

    logprob: float
    top_token_ids: tuple[int, ...]  # best first; those of probability 0 are left out
    top_logprobs: tuple[float, ...]


class Start(NamedTuple):
    """How long a request took to its first token."""

    queue_s: float  # to its admission
    prefill_s: float  # from there


class RequestOutput(NamedTuple):
    """What one step brought for one choice: new tokens, and the reason if they are its last.

    A step that computes a part of a prompt may bring scores alone.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    choice: int = 0  # which of its request
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if wanted
    scores: tuple[TokenLogprobs, ...] = ()  # of the next tokens of the prompt, from its second on
    start: Start | None = None  # with the first token that this engine gives


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The request was refused or lost; nothing more comes for it."""

    request_id: int
    error: LockstepError
    was_refused: bool = False  # the engine has never taken it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """How long the parts of steps took, on the engine's thread one after the other."""

    schedule: HistogramSnapshot  # deciding who runs, and flattening it
    encode: HistogramSnapshot  # making the message
    wire: HistogramSnapshot  # what is left of the round trip without forward pass and sampling
    forward: HistogramSnapshot  # on rank 0
    sample: HistogramSnapshot  # on rank 0
    publish: HistogramSnapshot  # applying the result, and giving each frontend its tokens
    total: HistogramSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What one step ran."""

    step_id: int
    num_decode_sequences: int  # fed one token each, and got another
    num_prefill_sequences: int  # fed tokens of their prompts, or all they have after a preemption
    num_prefill_tokens: int
    total_s: float


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Where the time of a rank's last step went."""

    rank: int
    prepare_s: float  # from the message's arrival to the forward pass
    forward_s: float
    sample_s: float  # of rank 0 alone


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine's start, and gauges of this moment; fields as on the wire."""

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
    queue_s: HistogramSnapshot  # of requests, from their arrival at the engine to admission
    ttft_s: HistogramSnapshot  # to the first token
    e2e_s: HistogramSnapshot  # to the end of the last choice
    itl_s: HistogramSnapshot  # between two tokens of a choice
    prompt_tokens: HistogramSnapshot  # of admitted requests
    output_tokens: HistogramSnapshot  # of choices that ended
    step_s: StepSeconds
    last_step: StepSummary | None  # None before the first
    ranks: tuple[RankSummary, ...]  # in their order, as the last step found them
    epoch: int  # life of the worker group, counted from 1
