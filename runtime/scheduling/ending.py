"""What ends a sequence."""

from collections.abc import Iterable

from runtime.request import FinishReason
from runtime.scheduling.sequence import Sequence


def end_by_token(
    sequences: Iterable[Sequence], token_ids: Iterable[int], eos_token_ids: frozenset[int]
) -> list[Sequence]:
    """Ends those of `sequences` whose new token, one each, is an end-of-sequence token for them."""
    if eos_token_ids.isdisjoint(token_ids):  # in most steps
        return []
    ended = []
    for sequence, token in zip(sequences, token_ids, strict=True):
        params = sequence.params
        is_early = sequence.num_output_tokens <= params.min_tokens
        if token in eos_token_ids and not (params.ignore_eos or is_early):
            sequence.finish(FinishReason.STOP)
            ended.append(sequence)
    return ended


def end_by_length(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Ends those that have all the tokens that they may have, and haven't ended by their token."""
    ended = []
    for sequence in sequences:
        if sequence.finish_reason is None and sequence.num_tokens >= sequence.max_num_tokens:
            sequence.finish(FinishReason.LENGTH)
            ended.append(sequence)
    return ended
