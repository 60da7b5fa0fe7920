"""What a workload takes at least, counted by hand for a small model."""

import pytest

from benchmarks.floor.work import work_of
from benchmarks.simulate.model_shape import ModelShape
from benchmarks.workloads.workload import Workload, WorkloadRequest

pytestmark = pytest.mark.unit

SHAPE = ModelShape(
    name="small",
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=100,
    windows=(0, 3),
    tied=True,
    max_model_len=64,
)
LINEAR = 2 * (8 * (2 * 8 + 2 * 4) + 3 * 8 * 16)  # weights of both layers
HEAD = 100 * 8
PER_PAIR = 4 * 4 * 2


def workload(*requests: tuple[list[int], int], prefix_caching: bool = False) -> Workload:
    return Workload(
        name="w",
        model="small",
        vocab_size=100,
        seed=0,
        prefix_caching=prefix_caching,
        requests=tuple(WorkloadRequest(tuple(ids), count) for ids, count in requests),
    )


def test_operations_and_bytes_of_one_request() -> None:
    work = work_of(workload(([1, 2, 3, 4], 3)), SHAPE)
    # Queries 0 to 3 see 1, 2, 3, 4 keys, behind the window 1, 2, 3, 3.
    assert work.prefill_flops == 2 * LINEAR * 4 + 2 * HEAD + PER_PAIR * (10 + 9)
    # Two more tokens are fed, at positions 4 and 5.
    decoded = (5 + 6) + (3 + 3)
    assert work.decode_flops == 2 * (2 * LINEAR + 2 * HEAD) + PER_PAIR * decoded
    assert work.num_bytes == 3 * SHAPE.step_weight_bytes + decoded * 2 * 2 * 2 * 2


def test_a_shared_beginning_counts_once_where_engines_may_keep_it() -> None:
    requests = ([1, 2, 3, 4], 1), ([1, 2, 3, 9], 1)
    kept = work_of(workload(*requests, prefix_caching=True), SHAPE)
    again = work_of(workload(*requests), SHAPE)
    assert again.flops - kept.flops == 2 * LINEAR * 3 + PER_PAIR * (6 + 6)


def test_the_floor_is_the_larger_of_two_times() -> None:
    work = work_of(workload(([1, 2], 2)), SHAPE)
    assert work.floor_s(flops_per_s=work.flops / 2, bytes_per_s=work.num_bytes) == 2
    assert work.floor_s(flops_per_s=work.flops, bytes_per_s=work.num_bytes / 3) == 3
