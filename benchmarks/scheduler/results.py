"""Collects the measurements of all repeats; makes metrics and tables of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median

from benchmarks.report import Figures, print_table
from benchmarks.scheduler.cases import AdmitCase, Case, DecodeCase
from benchmarks.scheduler.timing import Measurement

STEP_PHASES = ("schedule", "flatten", "update")
ADMISSION = ("add", "schedule")
Pair = tuple[Measurement, Measurement]  # with the prefix cache, without


@dataclass(slots=True)
class Results:
    """One list entry per repeat; the n-th of ours and the n-th of the peer's ran in turn."""

    ours: defaultdict[Case, list[Measurement]] = field(default_factory=lambda: defaultdict(list))
    vllm: defaultdict[Case, list[Measurement]] = field(default_factory=lambda: defaultdict(list))
    # With and without the prefix cache, in turns step by step. Who comes first in memory is up to
    # 1 % slower, so each repeat measures both orders.
    pairs: defaultdict[DecodeCase, list[list[Pair]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    hash_ns: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for case in self.ours:
            found |= self._decode(case) if isinstance(case, DecodeCase) else self._admit(case)
        for case in self.pairs:
            name = f"prefix_cache_ratio_{case.running}_running" + "_hybrid" * case.hybrid
            found[name] = self._prefix_cache_ratio(case)
        found["hash_ns_per_token"] = median(self.hash_ns)
        return found

    def print_tables(self) -> None:
        self._print_decode()
        self._print_admit()
        rows = [[case.running, layers(case), self._prefix_cache_ratio(case)] for case in self.pairs]
        title = "A decode step with the prefix cache over one without, in turns"
        print_table(["running", "layers", "ratio"], rows, title=title)
        hashing = Figures.of(self.hash_ns)
        row = [hashing.median, hashing.p10, hashing.p90]
        title = "Hashing a prompt, ns per token"
        print_table(["median", "p10", "p90"], [row], title=title)

    def _decode(self, case: DecodeCase) -> dict[str, float]:
        name = f"step_us_{case.name}"
        runs = self.ours[case]
        step, quiet = Figures.of(pooled(runs)), self._undisturbed(case)
        pauses = [us for each in runs for us in each.gc_pauses]
        found = {
            name: step.median,
            f"{name}_p99": step.p99,
            f"{name}_max": step.max,
            f"{name}_disturbed": sum(sum(each.disturbed) for each in runs),
            f"{name}_gc_pauses": len(pauses),
            f"{name}_gc_total": sum(pauses),
            f"{name}_gc_longest": max(pauses, default=0.0),
            f"full_gc_us_{case.name}": median(each.full_gc_us for each in runs),
        }
        if quiet is not None:
            found |= {f"{name}_p99_undisturbed": quiet.p99, f"{name}_max_undisturbed": quiet.max}
        if case in self.vllm:
            found[f"vllm_{name}"] = pooled_median(self.vllm[case])
            found[f"vllm_full_gc_us_{case.name}"] = median(
                each.full_gc_us for each in self.vllm[case]
            )
            found[f"ratio_vllm_{case.name}"] = self._ratio(case)
        return found

    def _admit(self, case: AdmitCase) -> dict[str, float]:
        runs = self.ours[case]
        quiet = self._undisturbed(case, ADMISSION)
        found = {
            f"admit_{case.name}": pooled_median(runs, ADMISSION),
            f"admit_{case.name}_disturbed": sum(sum(each.disturbed) for each in runs),
            f"admit_build_{case.name}": pooled_median(runs, ("build",)),
            f"admit_rest_{case.name}": pooled_median(runs, ("flatten", "update")),
        }
        if quiet is not None:
            found[f"admit_{case.name}_undisturbed"] = quiet.median
        if case in self.vllm:
            found[f"vllm_admit_{case.name}"] = pooled_median(self.vllm[case], ADMISSION)
            found[f"vllm_admit_build_{case.name}"] = pooled_median(self.vllm[case], ("build",))
            found[f"ratio_vllm_admit_{case.name}"] = self._ratio(case)
        return found

    def _undisturbed(self, case: Case, phases: Sequence[str] = ()) -> Figures | None:
        """Of the steps that had the core for themselves; None if none had."""
        times = [us for each in self.ours[case] for us in each.undisturbed(*phases)]
        return Figures.of(times) if times else None

    def _ratio(self, case: Case) -> float:
        """Ours over the peer's: the median over the repeats, each of which saw one machine."""
        phases = ("build", "add", "schedule") if isinstance(case, AdmitCase) else ()
        return median(
            pooled_median([ours], phases) / pooled_median([theirs], phases)
            for ours, theirs in zip(self.ours[case], self.vllm[case], strict=True)
        )

    def _prefix_cache_ratio(self, case: DecodeCase) -> float:
        """The median over the repeats of the two orders' geometric mean."""
        return median(
            geometric_mean(
                pooled_median([cached]) / pooled_median([plain]) for cached, plain in orders
            )
            for orders in self.pairs[case]
        )

    def _print_decode(self) -> None:
        steps: list[list[object]] = []
        parts: list[list[object]] = []
        for case, runs in self.ours.items():
            if not isinstance(case, DecodeCase):
                continue
            cache = "on" if case.prefix_cache else "off"
            cell = [case.running, case.waiting, layers(case), cache]
            step, quiet = Figures.of(pooled(runs)), self._undisturbed(case)
            row = [*cell, step.median, step.p10, step.p90, step.p99, step.max]
            row.append(sum(sum(each.disturbed) for each in runs))
            row += [quiet.p99, quiet.max] if quiet else [None, None]
            if self.vllm:
                compared = case in self.vllm
                row.append(pooled_median(self.vllm[case]) if compared else None)
                row.append(self._ratio(case) if compared else None)
            steps.append(row)
            pauses = [us for each in runs for us in each.gc_pauses]
            row = [*cell, *(pooled_median(runs, (phase,)) for phase in STEP_PHASES)]
            row += [len(pauses), sum(pauses), max(pauses, default=0.0)]
            row.append(median(each.full_gc_us for each in runs))
            parts.append(row)
        cells = ["running", "waiting", "layers", "cache"]
        headers = [*cells, "median", "p10", "p90", "p99", "max", "disturbed", "quiet p99", "max"]
        headers += ["vLLM", "ratio"] if self.vllm else []
        print_table(headers, steps, title="A decode step, us")
        headers = [*cells, *STEP_PHASES, "pauses", "in all", "longest", "full gc"]
        print_table(headers, parts, title="Medians of its parts, and the collector, us")

    def _print_admit(self) -> None:
        rows: list[list[object]] = []
        for case, runs in self.ours.items():
            if not isinstance(case, AdmitCase):
                continue
            both, quiet = Figures.of(pooled(runs, ADMISSION)), self._undisturbed(case, ADMISSION)
            row: list[object] = [
                *(f"{case.num_prompts} x {case.prompt_len}", case.hits),
                *(both.median, both.p10, both.p90, both.p99),
                *(sum(sum(each.disturbed) for each in runs), quiet and quiet.median),
                *(
                    pooled_median(runs, (name,))
                    for name in ("build", "add", *STEP_PHASES, "finish")
                ),
            ]
            if self.vllm:
                names = ("build", "add", "schedule", "update", "finish")
                row += [pooled_median(self.vllm[case], (name,)) for name in names]
                row.append(self._ratio(case))
            rows.append(row)
        headers = ["prompts", "hits", "add + schedule", "p10", "p90", "p99", "disturbed", "quiet"]
        headers += ["build", "add", *STEP_PHASES, "finish"]
        if self.vllm:
            headers += ["vLLM build", "add", "schedule", "update", "finish", "ratio"]
        print_table(headers, rows, title="A step that admits prompts, us")


def layers(case: DecodeCase) -> str:
    return "hybrid" if case.hybrid else "full"


def pooled(runs: Sequence[Measurement], phases: Sequence[str] = ()) -> list[float]:
    """Time of each step of all runs, in us: its named phases together, or all of them."""
    return [us for each in runs for us in each.total(*phases)]


def pooled_median(runs: Sequence[Measurement], phases: Sequence[str] = ()) -> float:
    return median(pooled(runs, phases))
