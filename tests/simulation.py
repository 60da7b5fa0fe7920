"""What the tests of `benchmarks.simulate` build alike."""

from collections.abc import Sequence

import numpy as np

from benchmarks.simulate.cost import CostConstants, CostModel, StepCost
from benchmarks.simulate.deployment import Deployment
from benchmarks.simulate.hardware import GPUS
from benchmarks.simulate.model_shape import PRESETS, ModelShape
from benchmarks.simulate.replicas import Replicas
from benchmarks.simulate.request_log import Slo
from benchmarks.simulate.workload import SimulatedRequest, Workload
from runtime.config import EngineConfig
from runtime.scheduling.sampler_inputs import Int32

# Datasheet speeds and nothing else: what no step can be faster than.
FLOOR = CostConstants(
    bandwidth_efficiency=1.0,
    flop_efficiency=1.0,
    link_efficiency=1.0,
    overhead_us=0.0,
    row_overhead_us=0.0,
    token_overhead_us=0.0,
    sampler_passes=0.0,
)
SLO = Slo(ttft_s=0.2, tpot_s=0.01)
# 2 layers of 4 heads over 2 KV heads of 8; easy to multiply out.
TINY = ModelShape(
    name="tiny",
    hidden_size=16,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
    windows=(0, 4),
    tied=False,
    element_bytes=2,
    max_model_len=4096,
)


def lens(*values: int) -> Int32:
    return np.array(values, np.int32)


def decode_step(cost: CostModel, *, rows: int, context: int) -> StepCost:
    """Each of `rows` feeds a token and attends to `context`, itself included."""
    before = np.full(rows, context - 1, np.int32)
    return cost.step(before, np.ones(rows, np.int32), num_samples=rows)


def make_deployment(
    *,
    shape: ModelShape = PRESETS["qwen3-0.6b"],
    num_replicas: int = 1,
    constants: CostConstants | None = None,
    **limits: object,
) -> Deployment:
    values = {"kv_memory": 1 << 30, "max_model_len": 4096, **limits}
    return Deployment(
        shape=shape,
        device=GPUS["H200"],
        config=EngineConfig(**values),
        constants=constants or CostConstants(),
        num_replicas=num_replicas,
    )


def make_workload(**values: object) -> Workload:
    defaults = {"rate": 50.0, "num_requests": 60, "prompt_longest": 2048, "output_longest": 1024}
    return Workload(**{**defaults, **values})


def request(
    arrival_s: float, prompt: int = 32, output: int = 1, **values: object
) -> SimulatedRequest:
    return SimulatedRequest(
        arrival_s=arrival_s, num_prompt_tokens=prompt, num_output_tokens=output, **values
    )


def serve(deployment: Deployment, requests: Sequence[SimulatedRequest]) -> Replicas:
    replicas = Replicas(deployment, requests)
    replicas.run()
    return replicas
