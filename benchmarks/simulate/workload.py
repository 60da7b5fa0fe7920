"""Which requests come, and when: drawn from stated distributions, or read from a trace.

Lengths are lognormal, given by median and 95th percentile, clipped. The defaults are our choice,
between public traces of chats (longer answers) and of code completion (longer prompts): prompts of
500 tokens, answers of 150, one in twenty at least four times as long. A deployment's own trace is
worth more than any of it.

A trace is a JSON object a line: `arrival_s`, `num_prompt_tokens`, `num_output_tokens`, and where
wanted `tenant`, `priority`, `prefix` (requests of the same name begin alike) and
`num_prefix_tokens` (of the prompt, how many).
"""

import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.config import require
from runtime.errors import ConfigError
from runtime.options import option

P95_DEVIATIONS = 1.6448536269514722  # of a normal distribution
# A stream of random numbers each, so that one setting leaves the other draws as they are.
ARRIVALS, PROMPTS, OUTPUTS, PREFIXES = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One line of a trace."""

    arrival_s: float
    num_prompt_tokens: int  # the prefix included
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0
    prefix: str = ""
    num_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.arrival_s) and self.arrival_s >= 0,
            f"arrival_s={self.arrival_s} must be at least 0",
        )
        for name in ("num_prompt_tokens", "num_output_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value} must be at least 1")
        require(
            0 <= self.num_prefix_tokens < self.num_prompt_tokens,
            f"num_prefix_tokens={self.num_prefix_tokens} must be at least 0 and less than "
            f"num_prompt_tokens={self.num_prompt_tokens}",
        )
        require(
            bool(self.prefix) or not self.num_prefix_tokens,
            f"num_prefix_tokens={self.num_prefix_tokens} needs a prefix",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A lognormal distribution of numbers of tokens, clipped to [1, longest]."""

    median: float
    p95: float
    longest: int

    def __post_init__(self) -> None:
        require(
            1 <= self.median <= self.p95 <= self.longest,
            f"lengths must rise from 1: median={self.median}, p95={self.p95}, "
            f"longest={self.longest}",
        )

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        deviation = math.log(self.p95 / self.median) / P95_DEVIATIONS
        drawn = rng.lognormal(math.log(self.median), deviation, count)
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests to draw: the same seed gives the same, at another rate only closer together."""

    rate: float = option(8.0, "Requests a second.")
    num_requests: int = option(2000, "How many to draw.")
    prompt_median: float = option(500.0, "Tokens of a prompt: median.")
    prompt_p95: float = option(2000.0, "Tokens of a prompt: 95th percentile.")
    prompt_longest: int = option(8192, "Tokens of a prompt: longer ones are cut.")
    output_median: float = option(150.0, "Tokens of an output: median.")
    output_p95: float = option(600.0, "Tokens of an output: 95th percentile.")
    output_longest: int = option(2048, "Tokens of an output: longer ones are cut.")
    burstiness: float = option(
        1.0, "Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier."
    )
    prefix_share: float = option(0.0, "Share of the requests that begin with a shared prefix.")
    num_prefixes: int = option(8, "Different shared prefixes.")
    num_prefix_tokens: int = option(
        256, "Length of a shared prefix, on top of the request's own prompt."
    )
    seed: int = option(0, "Of all draws.")

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"{name}={value} must be more than 0")
        for name in ("num_requests", "num_prefixes", "num_prefix_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value} must be at least 1")
        require(0 <= self.prefix_share <= 1, f"prefix_share={self.prefix_share} must be in [0, 1]")
        require(self.seed >= 0, f"seed={self.seed} must be at least 0")
        # They check themselves.
        _ = self.prompt, self.output

    @property
    def prompt(self) -> Lengths:
        return Lengths(median=self.prompt_median, p95=self.prompt_p95, longest=self.prompt_longest)

    @property
    def output(self) -> Lengths:
        return Lengths(median=self.output_median, p95=self.output_p95, longest=self.output_longest)

    def draw(self) -> list[SimulatedRequest]:
        """In the order of arrival. A shared prefix comes on top of the request's own prompt."""
        count = self.num_requests
        scale = 1 / (self.rate * self.burstiness)
        arrivals = np.cumsum(self._rng(ARRIVALS).gamma(self.burstiness, scale, count))
        prompts = self.prompt.draw(self._rng(PROMPTS), count)
        outputs = self.output.draw(self._rng(OUTPUTS), count)
        rng = self._rng(PREFIXES)
        shares = rng.random(count) < self.prefix_share
        prefixes = rng.integers(self.num_prefixes, size=count)
        return [
            SimulatedRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=num_prompt_tokens + shared * self.num_prefix_tokens,
                num_output_tokens=num_output_tokens,
                prefix=f"prefix-{prefix}" if shared else "",
                num_prefix_tokens=shared * self.num_prefix_tokens,
            )
            for arrival_s, num_prompt_tokens, num_output_tokens, shared, prefix in zip(
                arrivals.tolist(),
                prompts.tolist(),
                outputs.tolist(),
                shares.tolist(),
                prefixes.tolist(),
                strict=True,
            )
        ]

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream])


def read_trace(path: Path) -> list[SimulatedRequest]:
    """The requests of a trace in the order of arrival.

    Raises ConfigError, with the line: it isn't one of a trace.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace={path}: {error}") from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(_parse(line))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"trace={path}, line {number}: {error}") from error
    require(bool(requests), f"trace={path} holds no request")
    return sorted(requests, key=lambda request: request.arrival_s)


def write_trace(path: Path, requests: Iterable[SimulatedRequest]) -> None:
    lines = (json.dumps(asdict(request)) + "\n" for request in requests)
    path.write_text("".join(lines), encoding="utf-8")


def _parse(line: str) -> SimulatedRequest:
    values = json.loads(line)
    require(isinstance(values, dict), "must be a JSON object")
    known = {field.name: field for field in fields(SimulatedRequest)}
    if unknown := sorted(values.keys() - known.keys()):
        raise ConfigError(f"unknown key {unknown[0]!r}; known are {', '.join(known)}")
    for name, field in known.items():
        if name not in values:
            require(field.default is not MISSING, f"{name} is missing")
            continue
        value: Any = values[name]
        kinds = (int, float) if field.type is float else (field.type,)
        require(type(value) in kinds, f"{name}={value!r} must be of type {_name(field.type)}")
    return SimulatedRequest(**values)


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))
