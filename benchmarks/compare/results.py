"""What a comparison found: metrics, a table, a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.compare.pairs import Pairs, Side
from benchmarks.report import markdown_row, shown

HEADERS = (
    *("workload", "engine", "wall s", "output tokens/s", "all tokens/s"),
    *("ratio", "ratio min-max", "TTFT ms", "TPOT ms", "memory GB", "start s", "of the floor"),
)
NOTES = """\
ratio: how many times as fast the first engine was, pair by pair: the median, the least and the
most. TTFT and TPOT: of a workload of one request, by runs of one token and of all. memory: of all
processes of an engine at the end of a run, shared pages counted once. of the floor: the least time
that this machine could take, over the time taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two engines on one workload."""

    reference: str
    peer: str
    engines: Mapping[str, str]  # by subject: name and version
    startups_s: Mapping[str, float]  # by subject: from the process's start to its first answer
    pairs: Pairs
    floor_s: float | None


def metrics_of(found: Sequence[Compared]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for each in found:
        ending = f"{each.peer}_{each.pairs.workload.name}"
        for name, ratios in (
            ("ratio", each.pairs.ratios),
            ("ttft_ratio", each.pairs.ttft_ratios),
            ("tpot_ratio", each.pairs.tpot_ratios),
        ):
            if ratios:
                metrics[f"{name}_{ending}"] = median(ratios)
                metrics[f"{name}_min_{ending}"] = min(ratios)
                metrics[f"{name}_max_{ending}"] = max(ratios)
        for subject, side in sides(each):
            # The reference has other runs beside each peer.
            beside = f"_beside_{each.peer}" if subject == each.reference else ""
            place = f"{subject}_{each.pairs.workload.name}{beside}"
            output = each.pairs.workload.num_output_tokens
            metrics[f"wall_s_{place}"] = median(side.walls_s)
            metrics[f"output_tokens_per_s_{place}"] = output / median(side.walls_s)
            metrics[f"memory_gb_{place}"] = max(side.memory_bytes) / 1e9
            metrics[f"idle_share_{place}"] = max(side.idle_shares)
            metrics[f"start_s_{subject}{beside}"] = each.startups_s[subject]
    return metrics


def sides(compared: Compared) -> list[tuple[str, Side]]:
    pairs = compared.pairs
    return [(compared.reference, pairs.reference), (compared.peer, pairs.peer)]


def details_of(found: Sequence[Compared]) -> dict[str, object]:
    """Every run of every pair, and what was computed in it."""
    return {
        "comparisons": [
            {
                "workload": {
                    "name": each.pairs.workload.name,
                    "model": each.pairs.workload.model,
                    "digest": each.pairs.workload.digest(),
                    "prefix_caching": each.pairs.workload.prefix_caching,
                    "num_prompt_tokens": each.pairs.workload.num_prompt_tokens,
                    "num_output_tokens": each.pairs.workload.num_output_tokens,
                },
                "floor_s": each.floor_s,
                "ratios": each.pairs.ratios,
                "busy_while_idle": each.pairs.busy,
                "subjects": [
                    {
                        "name": subject,
                        "engine": each.engines[subject],
                        "startup_s": each.startups_s[subject],
                        "walls_s": side.walls_s,
                        "ttfts_s": side.ttfts_s,
                        "tpots_s": each.pairs.tpots_s(side),
                        "memory_bytes": side.memory_bytes,
                        "idle_shares": side.idle_shares,
                    }
                    for subject, side in sides(each)
                ],
            }
            for each in found
        ]
    }


def markdown(found: Sequence[Compared]) -> str:
    lines = [markdown_row(HEADERS), markdown_row(["---"] * len(HEADERS))]
    lines += [line for each in found for line in _rows(each)]
    return "\n".join(lines)


def _rows(compared: Compared) -> list[str]:
    pairs = compared.pairs
    workload = pairs.workload
    rows = []
    for subject, side in sides(compared):
        wall_s = median(side.walls_s)
        ratio, spread = 1.0, "-"
        if side is pairs.peer:
            ratio = median(pairs.ratios)
            spread = f"{shown(min(pairs.ratios))}-{shown(max(pairs.ratios))}"
        tpots_s = pairs.tpots_s(side)
        rows.append(
            markdown_row(
                (
                    *(workload.name, f"{subject}: {compared.engines[subject]}", wall_s),
                    workload.num_output_tokens / wall_s,
                    (workload.num_prompt_tokens + workload.num_output_tokens) / wall_s,
                    *(ratio, spread),
                    1000 * median(side.ttfts_s) if side.ttfts_s else None,
                    1000 * median(tpots_s) if tpots_s else None,
                    *(max(side.memory_bytes) / 1e9, compared.startups_s[subject]),
                    f"{compared.floor_s / wall_s:.0%}" if compared.floor_s else None,
                )
            )
        )
    return rows


def warnings(found: Sequence[Compared]) -> list[str]:
    """What makes figures doubtful."""
    lines = []
    for each in found:
        for subject, side in sides(each):
            name = each.pairs.workload.name
            role = "reference" if side is each.pairs.reference else "peer"
            if role in each.pairs.busy:
                share = max(side.idle_shares)
                lines.append(
                    f"{subject} took {share:.0%} of a core while it had nothing to do, beside "
                    f"{name}: the other's figures are too slow"
                )
            least, most = min(side.walls_s), max(side.walls_s)
            if most > 1.1 * least:
                lines.append(
                    f"{subject}, {name}: runs took {shown(least)} to {shown(most)} s: something "
                    "else was at work"
                )
    return lines
