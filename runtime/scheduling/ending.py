"""What ends a sequence."""

from collections import Counter
from collections.abc import Collection, Iterable

from runtime.request import FinishReason
from runtime.sampling_params import CompleteParams
from runtime.scheduling.sequence import Sequence


class EndTokens:
    """The tokens that end sequences: the model's, and those that live sequences name themselves."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self._counts = Counter(self.eos_token_ids)  # of the sequences that name each

    def add(self, sequence: Sequence) -> None:
        self._counts.update(set(sequence.params.stop_token_ids))

    def remove(self, sequence: Sequence) -> None:
        for token in set(sequence.params.stop_token_ids):
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]

    def end(self, sequences: Iterable[Sequence], token_ids: Iterable[int]) -> list[Sequence]:
        """Ends those of `sequences` whose new token, one each, is an end for them."""
        if self._counts.keys().isdisjoint(token_ids):  # in most steps
            return []
        ended = []
        for sequence, token in zip(sequences, token_ids, strict=True):
            if token in self._counts and ends_with(
                token, sequence.num_output_tokens, sequence.params, self.eos_token_ids
            ):
                sequence.finish(FinishReason.STOP)
                ended.append(sequence)
        return ended


def ends_with(
    token: int, num_output_tokens: int, params: CompleteParams, eos_token_ids: Collection[int]
) -> bool:
    """Whether `token`, the last of so many, ends an output."""
    if num_output_tokens <= params.min_tokens:
        return False
    if token in params.stop_token_ids:
        return True
    return token in eos_token_ids and not params.ignore_eos


def end_by_length(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Ends those that haven't ended by a token; all have the tokens that they may have."""
    ended = []
    for sequence in sequences:
        if sequence.finish_reason is None:
            assert sequence.num_tokens >= sequence.max_num_tokens, f"{sequence} has no last token"
            sequence.finish(FinishReason.LENGTH)
            ended.append(sequence)
    return ended
