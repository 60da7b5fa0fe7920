"""Ranks as processes of their own: each loads its shard of a model and tells how its memory grew.

`measure_loading` starts them; `python -m tests.loading_ranks` is one.
"""

import json
import re
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.tiny_models import load_executor
from workers.config import WorkerConfig
from workers.parallel import TensorParallel, join, open_rendezvous

ROOT = Path(__file__).parents[1]
STATUS = Path("/proc/self/status")
SAMPLE_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What loading did to one rank's memory."""

    shard_bytes: int  # this rank's parameters
    anonymous_bytes: int  # the most it had of its own while loading, over what it had before


class AnonymousPeak:
    """Watches this process's anonymous memory; what is mapped from files doesn't count."""

    def __init__(self) -> None:
        self._before = self._peak = _anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def look(self) -> None:
        self._peak = max(self._peak, _anonymous_bytes())

    def stop(self) -> int:
        """Ends the watch; returns the growth at its peak."""
        self._stop.set()
        self._thread.join()
        self.look()
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.look()


def _anonymous_bytes() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, "Linux tells RssAnon"
    return int(found[1]) * 1024


def measure_loading(
    folder: Path, tp: int, work: Path, *, timeout_s: float, quantization: str = "none"
) -> list[Growth]:
    """The growth of every rank."""
    store, port = open_rendezvous(tp, "127.0.0.1")
    outputs = [work / f"loading-{rank}-of-{tp}.json" for rank in range(tp)]
    command = [sys.executable, "-m", "tests.loading_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(port), str(rank), str(tp), output, folder, quantization], cwd=ROOT
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [rank.wait(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * tp
    del store  # kept until here: the ranks met at it
    return [Growth(**json.loads(output.read_text())) for output in outputs]


def main(port: str, rank: str, tp: str, output: str, folder: str, quantization: str) -> None:
    torch.set_num_threads(1)
    config = WorkerConfig(
        model_path="",
        rank=int(rank),
        tp_size=int(tp),
        rendezvous_host="127.0.0.1",
        rendezvous_port=int(port),
    )
    parallel = join(config, None)
    growth = _measure(Path(folder), parallel, quantization)
    parallel.close()
    Path(output).write_text(json.dumps(asdict(growth)))


def _measure(folder: Path, parallel: TensorParallel, quantization: str) -> Growth:
    watches: list[AnonymousPeak] = []
    grown: list[int] = []

    def follow(loaded: int, total: int) -> None:
        """The first report comes before anything is read, the last when all is."""
        if loaded == 0:
            watches.append(AnonymousPeak())
        watches[0].look()
        if loaded == total:
            grown.append(watches[0].stop())

    executor = load_executor(folder, parallel, follow, quantization=quantization)
    return Growth(shard_bytes=executor.spec.parameter_bytes, anonymous_bytes=grown[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
