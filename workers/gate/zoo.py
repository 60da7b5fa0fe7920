"""Every causal language model that transformers knows, through the gate: `make zoo`.

Then the text parts of every model that takes images beside text.

Each type is judged in a process of its own, from its class's default configuration, at TP 1 and
TP 2; a control then loses blocks on purpose, which every accepted class must notice.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_TYPES,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as MULTIMODAL_TYPES,
)

from workers.gate.verdict import control, judge
from workers.models.config import TRANSFORMERS_ERRORS

TP = 2
TIMEOUT_S = 120
MOVED = 0.01  # standard deviations by which lost blocks must move logits at least
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Where the defaults of a class make no model: as checkpoints have it.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}
# Where published checkpoints have layers that aren't served: what is left when there are none.
ATTENTION_ONLY: Mapping[str, Mapping[str, Any]] = {
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["attention"] * 4},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
    "lfm2_vl": {},  # its defaults are like that
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model type."""

    model_type: str
    architecture: str
    tp1: str  # equal: strictly; rounding: within transformers' own; refused
    tp2: str  # split, replicated, refused
    reason: str  # why it is refused, at TP 1 or at TP 2
    note: str  # what was tested, where that isn't what the class's defaults make
    moved: float | None  # by the control

    @property
    def line(self) -> str:
        what = "refused" if self.tp1 == "refused" else f"{self.tp1}, tp 2 {self.tp2}"
        note = f"({self.note}) " if self.note else ""
        return f"{self.model_type:28} {what:24} {note}{self.reason}".rstrip()


def default_config(model_type: str) -> tuple[PreTrainedConfig, str]:
    """The configuration that stands for a type, and a note on it."""
    changes = CHANGES.get(model_type) or ATTENTION_ONLY.get(model_type, {})
    config = CONFIG_MAPPING[model_type](**changes)
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True  # BERT's kinds are encoders unless they are told
        return config, "as a decoder"
    return config, "attention layers only" if model_type in ATTENTION_ONLY else ""


def examine(model_type: str) -> Entry:
    """What becomes of a type; whatever its code raises is a reason to refuse it."""
    try:
        config, note = default_config(model_type)
    except TRANSFORMERS_ERRORS as error:
        return _refused(model_type, f"its class has no default configuration: {error}")
    split = judge(config, TP)
    alone = split if split.accepted else judge(config, 1)
    if not alone.accepted:
        return _refused(model_type, alone.reason, alone.architecture, note)
    return Entry(
        model_type=model_type,
        architecture=alone.architecture,
        tp1="rounding" if alone.is_rounding else "equal",
        tp2="refused" if not split.accepted else "split" if split.is_split else "replicated",
        reason=split.reason,
        note=note,
        moved=control(config),
    )


def _refused(model_type: str, reason: str, architecture: str = "", note: str = "") -> Entry:
    return Entry(
        model_type=model_type,
        architecture=architecture or _named(model_type),
        tp1="refused",
        tp2="refused",
        reason=" ".join(reason.split()),
        note=note,
        moved=None,
    )


def _named(model_type: str) -> str:
    """The class that transformers has for a type."""
    return str(LANGUAGE_TYPES.get(model_type) or MULTIMODAL_TYPES[model_type])


def run(model_types: Sequence[str], jobs: int) -> Iterator[Entry]:
    """Examines each type in a child of this process, which has imported everything once."""
    waiting = list(model_types)
    running: dict[int, tuple[str, int]] = {}  # by process: its type, and the pipe it answers on
    while waiting or running:
        while waiting and len(running) < jobs:
            model_type = waiting.pop(0)
            process, pipe = _fork(model_type)
            running[process] = model_type, pipe
        process, status = os.wait()
        model_type, pipe = running.pop(process)
        with os.fdopen(pipe) as answer:
            text = answer.read()
        if text:
            yield Entry(**json.loads(text))
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            yield _refused(model_type, f"its test took longer than {TIMEOUT_S} s")
        else:
            yield _refused(model_type, f"its test ended with status {status}")


def _fork(model_type: str) -> tuple[int, int]:
    """The child's process id, and the pipe that it answers on."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    # From here on in the child, which must not return.
    try:
        os.close(reader)
        signal.alarm(TIMEOUT_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            entry = examine(model_type)
        except Exception as error:  # the edge of the process: whatever a model's code raises
            reason = f"its test failed unexpectedly: {type(error).__name__}: {error}"
            entry = _refused(model_type, reason)
        with os.fdopen(writer, "w") as answer:
            json.dump(asdict(entry), answer)
    finally:
        os._exit(0)


def main() -> None:
    """Prints a line a type and totals; fails where the control wasn't noticed."""
    parser = argparse.ArgumentParser(prog="python -m workers.gate.zoo", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all of them by default")
    parser.add_argument("--jobs", type=int, default=2, help="types at a time")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # forked children must not inherit threads
    if unknown := set(arguments.types) - set(LANGUAGE_TYPES) - set(MULTIMODAL_TYPES):
        parser.error(f"{sorted(unknown)[0]!r} is no model type that transformers knows")
    entries = _run_all(arguments.types or list(LANGUAGE_TYPES), arguments.jobs)
    multimodal: list[Entry] = []
    if not arguments.types:
        multimodal = _run_all(sorted(set(MULTIMODAL_TYPES) - set(LANGUAGE_TYPES)), arguments.jobs)
    moved = {e.model_type: e.moved for e in (*entries, *multimodal) if e.moved is not None}
    if unmoved := [model_type for model_type, by in moved.items() if not by >= MOVED]:
        sys.exit(f"error: lost blocks went unnoticed in {', '.join(unmoved)}")
    if arguments.json:
        content = {
            "transformers": transformers.__version__,
            "torch": torch.__version__.partition("+")[0],
            "types": list(map(asdict, entries)),
            "multimodal": list(map(asdict, multimodal)),
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _run_all(model_types: Sequence[str], jobs: int) -> list[Entry]:
    """Prints each line and the totals; returns the entries by name."""
    start = time.monotonic()
    entries = []
    for entry in run(model_types, jobs):
        entries.append(entry)
        print(entry.line, flush=True)
    _print_totals(entries, time.monotonic() - start)
    return sorted(entries, key=lambda entry: entry.model_type)


def _print_totals(entries: Sequence[Entry], seconds: float) -> None:
    alone = Counter(entry.tp1 for entry in entries)
    cut = Counter(entry.tp2 for entry in entries if entry.tp1 != "refused")
    least = min((entry.moved for entry in entries if entry.moved is not None), default=0.0)
    print(
        f"{len(entries)} types of transformers {transformers.__version__} in {seconds:.0f} s. "
        f"TP 1: {alone['equal']} strictly equal, {alone['rounding']} within their own rounding, "
        f"{alone['refused']} refused. TP 2, of those: {cut['split']} equal and split, "
        f"{cut['replicated']} equal and replicated, {cut['refused']} refused. Lost blocks move "
        f"logits by {least:.2f} std at least."
    )


if __name__ == "__main__":
    main()
