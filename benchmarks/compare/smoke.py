"""Work for a quick run of the tiny model."""

from benchmarks.make_model import TINY_VOCABULARY
from benchmarks.workloads.shapes import make_uniform
from benchmarks.workloads.workload import Workload


def smoke_workload(num_requests: int = 4) -> Workload:
    return make_uniform(
        model="tiny",
        vocab_size=TINY_VOCABULARY,
        num_requests=num_requests,
        prompt_len=16,
        output_len=8,
    )
