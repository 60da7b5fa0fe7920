"""Options of the commands that run engines on workload files."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path

import click

from benchmarks.compare.subjects import Places, Setup
from benchmarks.workloads.workload import Workload

# As much as the usual workloads need; longer ones get more.
MIN_MODEL_LEN = 1024

folder = click.Path(path_type=Path, exists=True, file_okay=False)
file = click.Path(path_type=Path, exists=True, dir_okay=False)

model_option = click.option("--model", type=folder, help="The model's folder.")
workload_option = click.option(
    "--workload", "paths", type=file, multiple=True, help="A workload file; may be given again."
)
ours_option = click.option(
    "--ours",
    "ours",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of Lockstep's engine, with _ for -; may be given again.",
)


def read_ours(settings: Sequence[str]) -> dict[str, object]:
    """Numbers and true or false are read as such, else the text.

    Raises UsageError: a setting isn't of the form NAME=VALUE.
    """
    options: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--ours {setting} must be NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def model_len(workloads: Sequence[Workload]) -> int:
    """Most tokens of prompt and output that engines are told to expect."""
    return max(MIN_MODEL_LEN, *(each.max_len for each in workloads))


def make_setup(
    model: Path,
    workloads: Sequence[Workload],
    ours: Mapping[str, object],
    places: Places | None = None,
) -> Setup:
    """The workloads agree in prefix caching. Without `places` there are no peers."""
    return Setup(
        model=model.absolute(),
        prefix_caching=workloads[0].prefix_caching,
        max_model_len=model_len(workloads),
        threads=len(os.sched_getaffinity(0)),
        ours=ours,
        places=places or Places(),
    )


def by_prefix_caching(workloads: Sequence[Workload]) -> list[list[Workload]]:
    """Engines are started for it: those without first, then those with."""
    groups = [
        [each for each in workloads if each.prefix_caching is wanted] for wanted in (False, True)
    ]
    return [group for group in groups if group]


def peer_options(command: Callable[..., None]) -> Callable[..., None]:
    """Where peers are installed: the command gets them as `places`."""

    @wraps(command)
    def gathered(
        *,
        vllm_python: Path | None,
        openvino_python: Path | None,
        openvino_model: Path | None,
        openvino_precision: str,
        llama_server: Path | None,
        gguf: Path | None,
        peer_dtype: str,
        **others: object,
    ) -> None:
        places = Places(
            vllm_python=vllm_python,
            openvino_python=openvino_python,
            openvino_model=openvino_model,
            openvino_precision=openvino_precision,
            llama_server=llama_server,
            gguf=gguf,
            dtype=peer_dtype,
        )
        command(places=places, **others)

    options = (
        click.option("--vllm-python", type=file, help="An interpreter that has vLLM."),
        click.option(
            "--peer-dtype",
            type=click.Choice(["bfloat16", "float32"]),
            default="bfloat16",
            show_default=True,
            help="What vLLM and transformers compute in; ours is --ours dtype=...",
        ),
        click.option("--openvino-python", type=file, help="One that has OpenVINO GenAI."),
        click.option("--openvino-model", type=folder, help="What optimum-cli exported."),
        click.option(
            "--openvino-precision",
            type=click.Choice(["bf16", "f32"]),
            default="bf16",
            show_default=True,
            help="What it computes in; not every CPU has bf16.",
        ),
        click.option("--llama-server", type=file, help="llama.cpp's server."),
        click.option("--gguf", type=file, help="The same model for llama.cpp."),
    )
    for option in reversed(options):
        gathered = option(gathered)
    return gathered
