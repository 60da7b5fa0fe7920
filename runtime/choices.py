"""The sequences of a request."""

from collections.abc import Iterator

from runtime.request import Request
from runtime.sampling_params import fork_seed
from runtime.scheduling.sequence import Sequence


def make_choices(
    request: Request, sequence_ids: Iterator[int], *, arrived_s: float
) -> list[Sequence]:
    """One for each choice; all but the first are its forks. Deadlines count from `arrived_s`."""
    first = Sequence(
        next(sequence_ids),
        request.prompt_token_ids,
        params=request.params,
        seed=request.seed,
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=request.tenant,
        deadline_s=None if request.timeout_s is None else arrived_s + request.timeout_s,
        bad_words=request.bad_words,
    )
    others = (
        first.fork(next(sequence_ids), seed=fork_seed(request.seed, index))
        for index in range(1, request.params.n)
    )
    return [first, *others]
