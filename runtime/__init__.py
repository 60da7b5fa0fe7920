"""The driver: engine, scheduler, executor, cluster, frontends. Knows no torch.

`runtime.LLM` and `runtime.SamplingParams` are what offline programs use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.llm import LLM
    from runtime.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Lazily, so that importing one module of the package doesn't import Ray and gRPC.
    if name == "LLM":
        from runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from runtime.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
