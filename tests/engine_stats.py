"""Statistics as an engine would tell them, for tests of what is made of them."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

from runtime.histogram import HistogramSnapshot
from runtime.request import EngineStats, ModelInfo

SNAPSHOT = HistogramSnapshot(bounds=(0.5, 1.0, 10.0), counts=(4, 0, 2, 1), sum=25.5)
MODEL = ModelInfo(
    name="tiny",
    path="",
    architecture="TinyForCausalLM",
    vocab_size=600,
    max_model_len=4096,
    eos_token_ids=(1,),
    tp_size=2,
    fingerprint="abc",
)


def make_stats(**changes: Any) -> EngineStats:
    """Numbers are 10, 20, 30 and so on in the order of fields; all histograms are SNAPSHOT."""
    stats: EngineStats = _make(EngineStats)
    return replace(stats, **changes)


def _make(kind: Any) -> Any:
    hints = get_type_hints(kind)
    values = {}
    for number, field in enumerate(fields(kind), start=1):
        hint = hints[field.name]
        if hint is int:
            values[field.name] = 10 * number
        elif hint is HistogramSnapshot:
            values[field.name] = SNAPSHOT
        elif is_dataclass(hint):
            values[field.name] = _make(hint)
        elif str(hint).startswith("tuple"):
            values[field.name] = ()
        else:
            values[field.name] = None
    return kind(**values)
