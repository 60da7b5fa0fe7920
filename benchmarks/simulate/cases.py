"""What a call of `simulate` runs: a case for each varied value and rate."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import click

from benchmarks.simulate.cost import CostConstants
from benchmarks.simulate.deployment import Deployment
from benchmarks.simulate.hardware import GPUS
from benchmarks.simulate.model_shape import PRESETS, read_model_config
from benchmarks.simulate.workload import (
    SimulatedRequest,
    Workload,
    read_trace,
    write_trace,
)
from runtime.config import EngineConfig, require

# Of EngineConfig, what says which model runs where, and how long that may take. The rest is limits.
NOT_LIMITS = frozenset(
    {
        *("model", "served_model_name", "dtype", "device", "launcher", "ray_address"),
        *("placement", "interface", "deterministic", "quantization", "kv_cache_dtype"),
        *("threads_per_rank", "attention", "step_timeout_s", "startup_timeout_s", "check_ranks"),
    }
)
LIMITS = tuple(field.name for field in fields(EngineConfig) if field.name not in NOT_LIMITS)
SMOKE_REQUESTS = 30

Values = Mapping[str, Any]  # the command's options


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the result."""

    label: str
    metric_prefix: str
    deployment: Deployment
    requests: Sequence[SimulatedRequest]

    @property
    def span_s(self) -> float:
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def offered_rate(self) -> float:
        """Requests/s, as they came."""
        return len(self.requests) / self.span_s if self.span_s else math.inf


def make_cases(ctx: click.Context, values: Values) -> Iterator[Case]:
    """Raises ConfigError: options contradict each other or can't be served."""
    loads = _loads(values)
    for vary_label, vary_metric, limits in _limits(ctx, values):
        deployment = _deployment(values, limits)
        for rate, requests in loads:
            rate_label = "trace" if rate is None else f"{rate:g}/s"
            rate_metric = "trace" if rate is None else f"rate_{rate:g}"
            yield Case(
                label=vary_label + rate_label,
                metric_prefix=f"{vary_metric}{rate_metric}_",
                deployment=deployment,
                requests=requests,
            )


def describe_load(values: Values) -> str:
    """What comes, in words."""
    if values["trace"]:
        return f"requests of {values['trace']}"
    workload = _workload(values, Workload().rate)
    prompt, output = workload.prompt, workload.output
    words = (
        f"{workload.num_requests} requests, seed {workload.seed}; tokens (median, p95, longest): "
        f"prompt {prompt.median:g}, {prompt.p95:g}, {prompt.longest}, output {output.median:g}, "
        f"{output.p95:g}, {output.longest}; gaps gamma of shape {workload.burstiness:g}"
    )
    if not workload.prefix_share:
        return f"{words}; no shared prefixes"
    return (
        f"{words}; {workload.prefix_share:.0%} begin with one of {workload.num_prefixes} prefixes "
        f"of {workload.num_prefix_tokens}"
    )


def _loads(values: Values) -> list[tuple[float | None, list[SimulatedRequest]]]:
    rates = values["rates"]
    if values["trace"]:
        requests = read_trace(values["trace"])
        return [(None, requests[:SMOKE_REQUESTS] if values["smoke"] else requests)]
    loads = [(rate, _workload(values, rate).draw()) for rate in rates or (Workload().rate,)]
    if values["save_trace"]:
        require(len(loads) == 1, f"save_trace takes one rate, not {len(loads)}")
        write_trace(values["save_trace"], loads[0][1])
    return [*loads]


def _workload(values: Values, rate: float) -> Workload:
    drawn = {each.name: values[each.name] for each in fields(Workload) if each.name != "rate"}
    if values["smoke"]:
        drawn["num_requests"] = min(SMOKE_REQUESTS, drawn["num_requests"])
    return Workload(rate=rate, **drawn)


def _limits(ctx: click.Context, values: Values) -> Iterator[tuple[str, str, EngineConfig]]:
    """Label, name for metrics, limits: one, or one for each varied value."""
    config = EngineConfig(**{name: values[name] for name in LIMITS})
    if values["vary"] is None:
        yield "", "", config
        return
    name, _, texts = values["vary"].partition("=")
    require(
        name in LIMITS and bool(texts),
        f"vary={values['vary']!r} must be a limit and its values, such as max_num_seqs=64,128; "
        f"limits are {', '.join(LIMITS)}",
    )
    (option,) = (each for each in ctx.command.params if each.name == name)
    for text in texts.split(","):
        value = option.type_cast_value(ctx, text)
        yield f"{name}={text}, ", f"{name}_{text}_", replace(config, **{name: value})


def _deployment(values: Values, config: EngineConfig) -> Deployment:
    path = values["model_config"]
    return Deployment(
        shape=PRESETS[values["model"]] if path is None else read_model_config(path),
        device=GPUS[values["gpu"]],
        config=config,
        constants=CostConstants(**{each.name: values[each.name] for each in fields(CostConstants)}),
        num_replicas=values["replicas"],
        router=values["router"],
    )
