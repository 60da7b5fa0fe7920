"""Two subjects on one workload, run by run in turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.compare.subject import Subject
from benchmarks.workloads.workload import Workload

# Of one core, by a subject that has nothing to do: more disturbs the other.
MAX_IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Side:
    """What one subject measured, run by run."""

    walls_s: list[float] = field(default_factory=list)
    # Of one token of output, where the workload is a single request.
    ttfts_s: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    # Share of one core that it took while the other computed.
    idle_shares: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The runs of a reference and of a peer, in turn: those of one number are a pair."""

    workload: Workload
    reference: Side
    peer: Side

    @property
    def ratios(self) -> list[float]:
        """How many times as fast the reference was, pair by pair."""
        return _ratios(self.peer.walls_s, self.reference.walls_s)

    @property
    def ttft_ratios(self) -> list[float]:
        return _ratios(self.peer.ttfts_s, self.reference.ttfts_s)

    def tpots_s(self, side: Side) -> list[float]:
        """Time per later token, where the workload is a single request."""
        if not side.ttfts_s:
            return []
        later = self.workload.num_output_tokens - 1
        first_s = median(side.ttfts_s)
        return [(wall_s - first_s) / later for wall_s in side.walls_s]

    @property
    def tpot_ratios(self) -> list[float]:
        return _ratios(self.tpots_s(self.peer), self.tpots_s(self.reference))

    @property
    def busy(self) -> list[str]:
        """Which of them weren't idle while the other computed."""
        sides = (("reference", self.reference), ("peer", self.peer))
        return [name for name, side in sides if max(side.idle_shares, default=0.0) > MAX_IDLE_SHARE]


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def measure_pairs(
    reference: Subject,
    peer: Subject,
    workload: Workload,
    *,
    num_pairs: int,
    on_run: Callable[[], object] = lambda: None,
) -> Pairs:
    """A run of each that isn't counted, then pairs.

    Both sides of a pair get the same token ids, other pairs others, so that no prefix cache has
    seen them.
    """
    pairs = Pairs(workload=workload, reference=Side(), peer=Side())
    distances = iter(range(1, 2 * num_pairs + 3))
    for number in range(num_pairs + 1):
        whole = workload.shifted(next(distances))
        first = workload.shifted(next(distances)).first_tokens()
        turns = (
            (reference, peer, pairs.reference, pairs.peer),
            (peer, reference, pairs.peer, pairs.reference),
        )
        for runs, idles, side, idle_side in turns:
            before_s = idles.cpu_s()
            wall_s = 0.0
            if len(workload.requests) == 1:
                turn = runs.run(first)
                wall_s += turn.wall_s
                if number:
                    side.ttfts_s.append(turn.wall_s)
            turn = runs.run(whole)
            wall_s += turn.wall_s
            on_run()
            if number:
                side.walls_s.append(turn.wall_s)
                side.memory_bytes.append(turn.memory_bytes)
                idle_side.idle_shares.append((idles.cpu_s() - before_s) / wall_s)
    return pairs
