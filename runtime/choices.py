"""The sequences of a request."""

from collections.abc import Iterator

from runtime.request import Request
from runtime.sampling_params import fork_seed
from runtime.scheduling.sequence import Sequence


def make_choices(
    request: Request, sequence_ids: Iterator[int], *, arrived_s: float
) -> dict[int, Sequence]:
    """One for each choice that hasn't ended, by its index. Deadlines count from `arrived_s`.

    All but the first are its forks, unless there is output already.
    """
    if any(each.token_ids or each.has_ended for each in request.resumed):
        choices = {
            index: _resume(request, index, next(sequence_ids), arrived_s)
            for index, each in enumerate(request.resumed)
            if not each.has_ended
        }
        first, *others = choices.values()
        for each in others:
            first.lead(each)
        return choices
    first = _make(request, next(sequence_ids), request.seed, arrived_s)
    choices = {0: first}
    for index in range(1, request.params.n):
        choices[index] = first.fork(next(sequence_ids), seed=fork_seed(request.seed, index))
    return choices


def _resume(request: Request, index: int, sequence_id: int, arrived_s: float) -> Sequence:
    """A choice that goes on by itself: what it shares with others the prefix cache has."""
    seed = fork_seed(request.seed, index)
    token_ids = request.resumed[index].token_ids
    sequence = _make(request, sequence_id, seed, arrived_s, token_ids)
    if index or token_ids:
        # Those of the prompt are told with choice 0, and all of them before its first token.
        sequence.num_scored_tokens = sequence.num_prompt_tokens - 1
    return sequence


def _make(
    request: Request,
    sequence_id: int,
    seed: int,
    arrived_s: float,
    output_token_ids: tuple[int, ...] = (),
) -> Sequence:
    return Sequence(
        sequence_id,
        request.prompt_token_ids,
        params=request.params,
        seed=seed,
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=request.tenant,
        deadline_s=None if request.timeout_s is None else arrived_s + request.timeout_s,
        submitted_s=arrived_s,
        bad_words=request.bad_words,
        is_resumed=request.was_accepted,
        output_token_ids=output_token_ids,
    )
