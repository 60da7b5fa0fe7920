"""Whether a configuration's class is served: its small copies run the strict test."""

import functools
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from workers.errors import ModelError, WorkerError
from workers.gate import strict
from workers.gate.errors import NoReference
from workers.gate.shrink import shrink
from workers.models.config import find_model_class, find_whole_class, text_part

Result = TypeVar("Result")

SEED = 1
# What is wrong is off by whole standard deviations, not by so little.
MAX_ROUNDING = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one configuration."""

    architecture: str  # the class that would serve it
    tp: int
    accepted: bool
    reason: str = ""  # why not
    # Else memory, a full disk or a missing package may be to blame: not to be kept.
    is_certain: bool = True
    error: float | None = None  # largest difference of logits in standard deviations, at `tp`
    # Transformers' own rounding moves the copy's logits by more than the bound.
    is_rounding: bool = False
    is_split: bool = True  # a rank holds a part of the weights and of the KV heads


def judge(config: PreTrainedConfig, tp: int) -> Verdict:
    """The verdict on a checkpoint's configuration at TP 1 and at `tp`."""
    torch.set_num_threads(1)
    architecture = ""
    try:
        architecture = find_model_class(text_part(config)).__name__
        findings, bound = _examine(config, tp)
        for size, finding in findings.items():
            _refuse_difference(architecture, finding, size, bound)
    except WorkerError as error:
        return Verdict(
            architecture=architecture,
            tp=tp,
            accepted=False,
            reason=str(error),
            is_certain=_is_certain(error),
        )
    return Verdict(
        architecture=architecture,
        tp=tp,
        accepted=True,
        error=findings[tp].error,
        is_rounding=bound > strict.BOUND,
        is_split=_is_split(findings[1], findings[tp]),
    )


def _is_certain(error: BaseException | None) -> bool:
    """Whether it would be refused again: what came of errors like these may pass."""
    while error is not None:
        if isinstance(error, ImportError | MemoryError | OSError | RuntimeError):
            return False
        if isinstance(error, WorkerError) and not isinstance(error, ModelError):
            return False
        error = error.__cause__
    return True


def control(config: PreTrainedConfig) -> float:
    """How far logits move when blocks are lost, in standard deviations: the test can fail.

    Raises ModelError: it can't be tested at all.
    """

    def run(small: PreTrainedConfig, folder: Path) -> float:
        model = strict.save_random(small, folder, seed=SEED)
        expected = functools.partial(strict.expect, model, seed=SEED)
        return strict.compare(folder, expected, 1, loses_blocks=True).error

    return _on_a_small_copy(config, 1, run)


def _examine(config: PreTrainedConfig, tp: int) -> tuple[dict[int, strict.Finding], float]:
    """What TP 1 and `tp` give, and by how much logits may differ."""

    def run(small: PreTrainedConfig, folder: Path) -> tuple[dict[int, strict.Finding], float]:
        model = strict.save_random(small, folder, seed=SEED)
        expected = functools.cache(functools.partial(strict.expect, model, seed=SEED))
        findings = {size: strict.compare(folder, expected, size) for size in sorted({1, tp})}
        errors = [finding.error for finding in findings.values()]
        return findings, _bound(model, expected(), errors)

    return _on_a_small_copy(config, tp, run)


def _on_a_small_copy(
    config: PreTrainedConfig, tp: int, run: Callable[[PreTrainedConfig, Path], Result]
) -> Result:
    """What `run` makes of a small copy, given a folder for its checkpoint.

    Of the whole checkpoint first, which may use its text part, and name its tensors, in its own
    way; else of the text part alone, where transformers itself makes a language model of it.
    """
    candidates = [text_part(config)]
    if candidates[0] is not config and find_whole_class(config) is not None:
        candidates = [config, *(candidates if find_model_class(config) is not None else ())]
    reason = ModelError("")
    for candidate in candidates:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return run(shrink(candidate, tp), Path(folder))
            except NoReference as error:
                reason = error
            except ModelError as error:
                # The folder is gone when somebody reads this.
                said = re.sub(rf"{re.escape(folder)}(/[\w.]+)?", "a small copy", str(error))
                raise ModelError(said) from error
    raise reason


def _bound(model: PreTrainedModel, expected: strict.Expected, errors: Sequence[float]) -> float:
    """By how much logits may differ, in standard deviations, where they do by `errors`."""
    if not any(strict.BOUND <= error < MAX_ROUNDING for error in errors):
        return strict.BOUND
    return max(strict.BOUND, min(strict.rounding(model, expected), MAX_ROUNDING))


def _refuse_difference(architecture: str, finding: strict.Finding, tp: int, bound: float) -> None:
    """TP 1 comes first: where a larger one is refused, that is served."""
    advice = "" if tp == 1 else ": serve it with --tp 1"
    if not finding.error < bound:  # also where it is no number
        raise ModelError(
            f"{architecture} gives other logits than transformers at tp={tp}: a small copy's are "
            f"off by {finding.error:.2g} of their standard deviation, and {bound:g} is the "
            f"limit{advice}"
        )
    if not finding.greedy_equal:
        raise ModelError(
            f"{architecture} gives equal logits at tp={tp}, but transformers' generate goes on "
            f"with other tokens than they say{advice}"
        )


def _is_split(whole: strict.Finding, rank: strict.Finding) -> bool:
    heads = zip(rank.kv_heads, whole.kv_heads, strict=True)
    return rank.parameter_bytes < 0.7 * whole.parameter_bytes and all(
        own < every or every == 1 for own, every in heads
    )
