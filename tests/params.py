"""Sampling parameters as the engine gets them."""

from typing import Any

from runtime.sampling_params import LOCKSTEP_DEFAULTS, CompleteParams, SamplingParams


def complete_params(**fields: Any) -> CompleteParams:
    """With Lockstep's own defaults."""
    return SamplingParams(**fields).complete(LOCKSTEP_DEFAULTS)
