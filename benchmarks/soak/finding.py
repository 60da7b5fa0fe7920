"""What one soak showed, and what of it must not be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.soak.traffic import Log
from protos import common_pb2

# Of resident memory, from the second quarter of the time to the last: allocators move that much.
MAX_GROWTH = 0.02
MAX_GROWTH_MB = 8.0
# In less time than this the first quarter isn't enough to fill caches and arenas.
LEAST_S_FOR_MEMORY = 600.0
FIRST_EPOCH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The memory of one process, in MB."""

    before: float  # median of the second quarter
    after: float  # median of the last

    @classmethod
    def of(cls, megabytes: Sequence[float]) -> "Growth":
        """Of looks at equal distances. Raises ValueError: there are fewer than 4."""
        if len(megabytes) < 4:
            raise ValueError(f"{len(megabytes)} looks at the memory must be at least 4")
        quarter = len(megabytes) // 4
        return cls(
            before=median(megabytes[quarter : 2 * quarter]), after=median(megabytes[-quarter:])
        )

    @property
    def megabytes(self) -> float:
        return self.after - self.before

    @property
    def is_flat(self) -> bool:
        return self.megabytes < max(MAX_GROWTH_MB, MAX_GROWTH * self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one soak showed."""

    seconds: float
    log: Log
    num_gaps: int
    leaks: Sequence[str]  # what was still held in gaps
    megabytes: Mapping[str, Sequence[float]]  # of each process, at equal distances
    stats: common_pb2.EngineStats  # at the end

    def growth(self) -> dict[str, Growth]:
        return {name: Growth.of(looks) for name, looks in self.megabytes.items()}

    def faults(self) -> list[str]:
        """One line for each thing that must not be; that ranks disagree ends the server."""
        faults = [f"left in a gap: {leak}" for leak in self.leaks]
        faults += self.log.faults
        if self.log.num_faults > len(self.log.faults):
            faults.append(f"and {self.log.num_faults - len(self.log.faults)} more requests")
        if self.stats.epoch != FIRST_EPOCH:
            faults.append(f"the workers were started again: epoch {self.stats.epoch}")
        if self.stats.num_preemptions == 0:
            faults.append("no sequence was preempted: the pool is too large to show anything")
        if self.seconds >= LEAST_S_FOR_MEMORY:
            faults += [
                f"{name} grew by {growth.megabytes:.1f} MB, from {growth.before:.0f} MB"
                for name, growth in self.growth().items()
                if not growth.is_flat
            ]
        return faults
