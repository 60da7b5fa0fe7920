"""The running sequences whose sampling needs more than one value per row, and what they need."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.sampling_params import SamplingParams
from runtime.scheduling.sampler_inputs import (
    BadWords,
    Float32,
    Int32,
    SamplerInputs,
    TokenBiases,
    TokenHistory,
    no_inputs,
)
from runtime.scheduling.sequence import Sequence as Choice
from runtime.scheduling.token_masks import TokenMasks, bits_of, compress

NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Biases:
    token_ids: Int32
    values: Float32

    @classmethod
    def of(cls, values: dict[int, float]) -> "_Biases":
        return cls(
            token_ids=np.array(list(values), np.int32),
            values=np.array(list(values.values()), np.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """What stays the same for one sequence."""

    biases: _Biases
    early_biases: _Biases  # while it must not end
    mask: TokenMasks | None  # of one row
    bad_words: tuple[Int32, ...]  # of 2 tokens and more
    prompt_ids: Int32 | None  # each once, where a penalty needs them
    wants_output: bool  # in its history
    num_tail_tokens: int  # that bad words are compared with

    @property
    def look_back(self) -> bool:
        """Whether they depend on the tokens before."""
        return self.wants_output or self.num_tail_tokens > 0


class SamplerNeeds:
    """The sampled rows of one step that need more, and what."""

    def __init__(self, rows: list[tuple[int, Choice, int, _Needs]]) -> None:
        """Rows of R, each with how many output tokens come before its sample."""
        self._rows = rows

    @property
    def look_back(self) -> bool:
        """Whether one depends on the tokens before, which must be known to gather."""
        return any(needs.look_back for _, _, _, needs in self._rows)

    def gather(self) -> SamplerInputs:
        """What the sampled rows need."""
        if not self._rows:
            return no_inputs()
        rows = self._rows
        biases = [(row, _biases_after(count, each, needs)) for row, each, count, needs in rows]
        masks = [(row, needs.mask) for row, _, _, needs in rows if needs.mask is not None]
        words = [(row, word) for row, _, _, needs in rows for word in needs.bad_words]
        histories = [(row, *_history(each, needs)) for row, each, _, needs in rows]
        histories = [each for each in histories if len(each[1])]
        return SamplerInputs(
            biases=TokenBiases(
                rows=_repeated((row, each.token_ids) for row, each in biases),
                token_ids=_joined([each.token_ids for _, each in biases]),
                values=_joined([each.values for _, each in biases], np.float32),
            ),
            masks=TokenMasks(
                rows=_ints([row for row, _ in masks]),
                kinds=_joined([each.kinds for _, each in masks], np.uint8),
                num_words=_joined([each.num_words for _, each in masks]),
                words=_joined([each.words for _, each in masks], np.uint32),
            ),
            bad_words=BadWords(
                rows=_ints([row for row, _ in words]),
                lengths=_ints([len(word) for _, word in words]),
                token_ids=_joined([word for _, word in words]),
            ),
            history=TokenHistory(
                rows=_ints([row for row, _, _ in histories]),
                lengths=_ints([len(tokens) for _, tokens, _ in histories]),
                num_prompt_tokens=_ints([count for _, _, count in histories]),
                token_ids=_joined([tokens for _, tokens, _ in histories]),
            ),
        )


NO_NEEDS = SamplerNeeds([])


class SamplerRows:
    """Sequences that hold blocks and need more; the others cost nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._needs: dict[int, _Needs] = {}  # by sequence id

    def add(self, sequence: Choice) -> None:
        if not _needs_anything(sequence):
            return
        source = sequence.fork_of or sequence
        if not isinstance(source.sampler_needs, _Needs):
            source.sampler_needs = _needs_of(sequence, self._vocab_size)
        assert isinstance(source.sampler_needs, _Needs)
        self._needs[sequence.sequence_id] = source.sampler_needs

    def remove(self, sequence_id: int) -> None:
        self._needs.pop(sequence_id, None)

    def find(self, sampled: Iterable[Choice]) -> SamplerNeeds:
        """Who of the sampled rows, one for each sequence, needs more in a step just decided."""
        if not self._needs:
            return NO_NEEDS
        return SamplerNeeds(
            [
                # The pending token that this step samples is none of those before it.
                (row, each, each.num_planned_tokens - each.num_prompt_tokens - 1, needs)
                for row, each in enumerate(sampled)
                if (needs := self._needs.get(each.sequence_id)) is not None
            ]
        )


def _needs_anything(sequence: Choice) -> bool:
    params = sequence.params
    return bool(
        params.logit_bias
        or sequence.bad_words
        or params.allowed_token_ids
        or params.has_penalties
        or (params.min_tokens and params.stop_token_ids)
    )


def _needs_of(sequence: Choice, vocab_size: int) -> _Needs:
    """The same for all choices of a request."""
    params = sequence.params
    forbidden = [word[0] for word in sequence.bad_words if len(word) == 1]
    late = dict(params.logit_bias or {}) | dict.fromkeys(forbidden, NEVER)
    early = late | dict.fromkeys(params.stop_token_ids, NEVER) if params.min_tokens else late
    words = tuple(_ints(word) for word in sequence.bad_words if len(word) > 1)
    prompt = np.array(sequence.token_ids[: sequence.num_prompt_tokens], np.int32)
    return _Needs(
        biases=_Biases.of(late),
        early_biases=_Biases.of(early),
        mask=_allowed_mask(params, vocab_size),
        bad_words=words,
        prompt_ids=np.unique(prompt) if params.repetition_penalty != 1 else None,
        wants_output=params.has_penalties,
        num_tail_tokens=max((len(word) for word in words), default=1) - 1,
    )


def _allowed_mask(params: SamplingParams, vocab_size: int) -> TokenMasks | None:
    if not params.allowed_token_ids:
        return None
    bits = bits_of(_ints(params.allowed_token_ids), vocab_size)
    return compress(bits[None], vocab_size=vocab_size)


def _biases_after(num_output_tokens: int, sequence: Choice, needs: _Needs) -> _Biases:
    is_early = num_output_tokens < sequence.params.min_tokens
    return needs.early_biases if is_early else needs.biases


def _history(sequence: Choice, needs: _Needs) -> tuple[Int32, int]:
    """The tokens that this row's sampling looks at, and how many of them are of the prompt."""
    num_prompt = sequence.num_prompt_tokens
    start = max(0, sequence.num_tokens - needs.num_tail_tokens)
    if needs.wants_output:
        start = min(start, num_prompt)
    tokens = np.array(sequence.token_ids[start:], np.int32)
    num_before = max(0, num_prompt - start)
    if needs.prompt_ids is None or start == 0:  # where all is there, words must not meet more
        return tokens, num_before
    return np.concatenate((needs.prompt_ids, tokens)), len(needs.prompt_ids) + num_before


def _repeated(pairs: Iterable[tuple[int, Int32]]) -> Int32:
    """The row of each value."""
    rows = [(row, len(values)) for row, values in pairs]
    return np.repeat(_ints([row for row, _ in rows]), [count for _, count in rows])


def _joined(arrays: Sequence[NDArray[Any]], dtype: type = np.int32) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _ints(values: Sequence[int]) -> Int32:
    return np.array(values, np.int32)
