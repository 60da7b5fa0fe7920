"""What faults did, one by one and all together."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from benchmarks.chaos.faults import Kind
from benchmarks.chaos.load import Tally
from benchmarks.chaos.server import Leftovers
from benchmarks.overload.measure import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one fault did. Seconds are since it befell; None: it didn't come to that."""

    number: int
    kind: Kind
    victim: str
    at_s: float  # since the faults began
    detection_s: float | None = None
    limit_s: float | None = None  # of the detection
    ready_s: float | None = None  # until requests could run again
    recovery_s: float | None = None  # to the first tokens afterwards
    cause: str = ""  # in the engine's words
    complaints: tuple[str, ...] = ()  # what should have been otherwise


@dataclass(slots=True)
class Result:
    """All of one run."""

    findings: list[Finding] = field(default_factory=list)
    undisturbed: Tally = field(default_factory=Tally)
    disturbed: Tally = field(default_factory=Tally)
    seconds: float = 0.0  # of load with faults
    num_preemptions: int = 0
    idle_s: float | None = None  # from the last answer until nothing was held; None: it wasn't so
    state: State | None = None  # after that
    leftovers: Leftovers = field(default_factory=Leftovers)

    def complaints(self) -> Iterator[str]:
        """All that should have been otherwise, a line each."""
        for name, tally in (("undisturbed", self.undisturbed), ("under faults", self.disturbed)):
            yield from (f"{name}: {line}" for line in tally.lines())
        for each in self.findings:
            yield from (f"fault {each.number} ({each.kind}): {line}" for line in each.complaints)
        if self.idle_s is None:
            yield f"not idle after the load: {self.state}"
        if self.leftovers.exit_code != 0:
            yield f"the server ended with code {self.leftovers.exit_code}"
        yield from (f"left behind: {each}" for each in self.leftovers.things)

    def metrics(self) -> dict[str, float]:
        detections = [each.detection_s for each in self.findings if each.detection_s is not None]
        recoveries = [each.recovery_s for each in self.findings if each.recovery_s is not None]
        metrics = {
            "faults": float(len(self.findings)),
            "requests": float(self.disturbed.num_requests),
            "request_s_max": self.disturbed.longest_s,
            "requests_lost": float(len(self.disturbed.lost)),
            "outputs_differing": float(len(self.disturbed.differing)),
            "outputs_differing_undisturbed": float(len(self.undisturbed.differing)),
            "num_preemptions": float(self.num_preemptions),
            "complaints": float(len(list(self.complaints()))),
            "seconds": self.seconds,
        }
        for name, values in (("detection_s", detections), ("recovery_s", recoveries)):
            if values:
                metrics |= {f"{name}_max": max(values), f"{name}_median": median(values)}
        for kind in sorted({each.kind for each in self.findings}):
            values = [
                each.detection_s
                for each in self.findings
                if each.kind == kind and each.detection_s is not None
            ]
            if values:
                metrics[f"detection_s_max_{kind.replace('-', '_')}"] = max(values)
        return metrics
