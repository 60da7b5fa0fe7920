"""Ranks as processes of their own: each loads its shard of every model and compares.

`run_ranks` starts them; `python -m tests.ranks` is one.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.tiny_models import (
    Expected,
    Feeder,
    error_in_std,
    forced_logits,
    greedy_tokens,
    load_executor,
)
from workers.config import WorkerConfig
from workers.parallel import TensorParallel, join, open_rendezvous

ROOT = Path(__file__).parents[1]
EXPECTED = "expected.pt"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rank found out about one model."""

    parameter_bytes: int
    read_bytes: int
    kv_heads: list[int]
    error: float | None = None  # rank 0: in standard deviations of the logits
    greedy_equal: bool | None = None  # rank 0


def examine(folder: Path, parallel: TensorParallel | None = None) -> Finding:
    progress: list[tuple[int, int]] = []
    executor = load_executor(folder, parallel, lambda *report: progress.append(report))
    assert progress[-1][0] == progress[-1][1], "progress ends at its total"
    expected: Expected = torch.load(folder / EXPECTED, weights_only=False)
    feeder = Feeder(executor)
    logits = forced_logits(feeder, expected.texts)
    greedy = greedy_tokens(feeder, expected.texts, expected.greedy)
    return Finding(
        parameter_bytes=executor.spec.parameter_bytes,
        read_bytes=progress[-1][1],
        kv_heads=[layer.num_kv_heads for layer in executor.spec.layers],
        error=None if logits is None else error_in_std(logits, expected.logits),
        greedy_equal=None if greedy is None else greedy == expected.greedy,
    )


def run_ranks(folders: Sequence[Path], tp: int, work: Path) -> dict[str, list[Finding]]:
    """Findings of every rank by the model's folder name."""
    store, port = open_rendezvous(tp, "127.0.0.1")
    outputs = [work / f"rank-{rank}-of-{tp}.json" for rank in range(tp)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(port), str(rank), str(tp), output, *folders],
            cwd=ROOT,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [rank.wait(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * tp
    del store  # kept until here: the ranks met at it
    reports = [json.loads(output.read_text()) for output in outputs]
    return {
        folder.name: [Finding(**report[folder.name]) for report in reports] for folder in folders
    }


def main(port: str, rank: str, tp: str, output: str, *folders: str) -> None:
    torch.set_num_threads(1)
    config = WorkerConfig(
        model_path="",
        rank=int(rank),
        tp_size=int(tp),
        rendezvous_host="127.0.0.1",
        rendezvous_port=int(port),
    )
    parallel = join(config, None)
    findings = {Path(folder).name: asdict(examine(Path(folder), parallel)) for folder in folders}
    parallel.close()
    Path(output).write_text(json.dumps(findings))


if __name__ == "__main__":
    main(*sys.argv[1:])
