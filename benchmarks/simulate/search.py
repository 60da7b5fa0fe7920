"""The fewest replicas that keep the SLOs."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulate.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was tried, and the fewest replicas that were enough; None where none were."""

    tries: dict[int, Summary]
    answer: int | None


def find_replicas(run: Callable[[int], Summary], *, good_share: float, max_replicas: int) -> Search:
    """Doubles, then halves the interval; takes it that more replicas never serve fewer.

    `run` serves the workload by so many replicas. Enough is a share of good requests of
    `good_share`. The answer was tried, and so was one replica less.
    """
    tries: dict[int, Summary] = {}

    def is_enough(count: int) -> bool:
        tries[count] = run(count)
        return tries[count].good_share >= good_share

    too_few, enough = 0, 1
    while not is_enough(enough):
        too_few = enough
        if enough == max_replicas:
            return Search(tries=tries, answer=None)
        enough = min(2 * enough, max_replicas)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return Search(tries=tries, answer=enough)
