"""What a workload takes at least: floating-point operations, and bytes read."""

from dataclasses import dataclass
from itertools import takewhile

from benchmarks.simulate.model_shape import ModelShape
from benchmarks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Every token computed once; a step at a time, each with all that is left to do."""

    prefill_flops: float
    decode_flops: float
    num_bytes: float

    @property
    def flops(self) -> float:
        return self.prefill_flops + self.decode_flops

    def floor_s(self, *, flops_per_s: float, bytes_per_s: float) -> float:
        """The larger of the two times: at best one hides behind the other."""
        return max(self.flops / flops_per_s, self.num_bytes / bytes_per_s)


def work_of(workload: Workload, shape: ModelShape) -> Work:
    """Two operations for each weight and token, four for each pair of a query and a key.

    The head is applied where a token is sampled. What all prompts begin with counts once, where
    the workload lets engines keep it. Weights are read once a step, of which there are as many as
    the longest output has tokens; keys and values by each decoded token.
    """
    shared = 0
    if workload.prefix_caching and len(workload.requests) > 1:
        shared = num_shared(workload)
    linear, head = 2 * shape.linear_params, 2 * shape.head_params
    per_pair = 4 * shape.num_heads * shape.head_dim
    kv_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.element_bytes

    prefill = linear * shared + per_pair * pairs(shape, 0, shared)
    decode = num_bytes = 0.0
    for request in workload.requests:
        end = len(request.prompt)
        last = end + request.output_len - 1
        decoded = pairs(shape, end, last)
        prefill += linear * (end - shared) + head + per_pair * pairs(shape, shared, end)
        decode += (request.output_len - 1) * (linear + head) + per_pair * decoded
        num_bytes += kv_bytes * decoded
    num_steps = max(each.output_len for each in workload.requests)
    return Work(
        prefill_flops=prefill,
        decode_flops=decode,
        num_bytes=num_bytes + num_steps * shape.step_weight_bytes,
    )


def num_shared(workload: Workload) -> int:
    """Tokens that all prompts begin with."""
    columns = zip(*(each.prompt for each in workload.requests), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def pairs(shape: ModelShape, start: int, end: int) -> int:
    """Of queries at positions [start, end) with the keys that each sees, in all layers."""
    total = 0
    for window in set(shape.windows):
        seen = sum(min(each + 1, window or each + 1) for each in range(start, end))
        total += seen * shape.windows.count(window)
    return total
