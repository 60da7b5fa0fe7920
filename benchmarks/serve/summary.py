"""What a load at one rate brought."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.clients import Answer
from benchmarks.report import markdown_row, percentile
from benchmarks.serve.load import Outcome

PERCENTS = (50, 90, 99)
# Of each request but itl, which is of each gap between messages.
FIGURES = ("ttft", "tpot", "itl", "e2e")
HEADERS = (
    *("requests/s offered", "finished/s", "goodput/s", "failed", "output tokens/s"),
    *(f"{figure.upper()} p{percent} ms" for figure in FIGURES for percent in PERCENTS),
    "sent late p99 ms",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """A request is good that meets both; None: any value does."""

    ttft_s: float | None
    tpot_s: float | None

    def met_by(self, answer: Answer) -> bool:
        is_soon = self.ttft_s is None or answer.ttft_s <= self.ttft_s
        tpot_s = answer.tpot_s
        return is_soon and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Rates are over the time from the first request's turn to the last one's end."""

    offered_per_s: float
    finished_per_s: float
    goodput_per_s: float
    output_tokens_per_s: float
    failures: Counter[str]  # by what the server said
    latencies_ms: dict[tuple[str, int], float]  # by figure and percentile; none of no request
    late_p99_ms: float

    def metrics(self) -> dict[str, float]:
        metrics = {
            "finished_per_s": self.finished_per_s,
            "goodput_per_s": self.goodput_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "failed": float(self.failures.total()),
            "late_ms_p99": self.late_p99_ms,
        }
        return metrics | {
            f"{figure}_ms_p{percent}": value
            for (figure, percent), value in self.latencies_ms.items()
        }

    def row(self) -> str:
        return markdown_row(
            (
                *(self.offered_per_s, self.finished_per_s, self.goodput_per_s),
                *(self.failures.total(), self.output_tokens_per_s),
                *(self.latencies_ms.get((name, each)) for name in FIGURES for each in PERCENTS),
                self.late_p99_ms,
            )
        )


def sum_up(
    outcomes: Sequence[Outcome], *, offered_per_s: float, seconds: float, goals: Goals
) -> Summary:
    answers = [each.answer for each in outcomes if each.answer is not None]
    values: dict[str, list[float]] = {
        "ttft": [each.ttft_s for each in answers],
        "tpot": [each.tpot_s for each in answers if each.tpot_s is not None],
        "itl": [gap for each in answers for gap in each.gaps_s],
        "e2e": [each.total_s for each in answers],
    }
    return Summary(
        offered_per_s=offered_per_s,
        finished_per_s=len(answers) / seconds,
        goodput_per_s=sum(goals.met_by(each) for each in answers) / seconds,
        output_tokens_per_s=sum(each.num_tokens for each in answers) / seconds,
        failures=Counter(each.detail for each in outcomes if each.answer is None),
        latencies_ms={
            (figure, percent): 1000 * percentile(sorted(each), percent)
            for figure, each in values.items()
            if each
            for percent in PERCENTS
        },
        late_p99_ms=1000 * percentile(sorted(each.late_s for each in outcomes), 99),
    )
