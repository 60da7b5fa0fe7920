"""The engines there are, and how each is started on a model."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

import benchmarks
from benchmarks import peers
from benchmarks.compare.subject import SubjectSpec

ROOT = Path(benchmarks.__file__).resolve().parent.parent
PEERS = Path(peers.__file__).resolve().parent
KV_GIB = 2  # of each rank, for every engine that takes it
MAX_NUM_SEQS = 64
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where peers are installed, and the model in forms of their own."""

    vllm_python: Path | None = None
    openvino_python: Path | None = None
    openvino_model: Path | None = None
    openvino_precision: str = "bf16"
    llama_server: Path | None = None
    gguf: Path | None = None
    dtype: str = "bfloat16"  # of vLLM and transformers; the others' models tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all engines are given."""

    model: Path
    prefix_caching: bool
    max_model_len: int
    threads: int
    ours: Mapping[str, object] = field(default_factory=dict)  # options of EngineConfig beside
    places: Places = field(default_factory=Places)


def specify(name: str, setup: Setup) -> SubjectSpec:
    """One of SUBJECTS. Raises UsageError: an option that it needs is missing."""
    return SUBJECTS[name](name, setup)


def _engine_options(setup: Setup, tp: int) -> dict[str, object]:
    return {
        "model": str(setup.model),
        "dtype": "bfloat16",
        "launcher": "local",
        "tp": tp,
        "kv_memory": KV_GIB << 30,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": setup.max_model_len,
        "prefix_cache": setup.prefix_caching,
        **setup.ours,
    }


def _ours(tp: int) -> Callable[[str, Setup], SubjectSpec]:
    def specified(name: str, setup: Setup) -> SubjectSpec:
        module = "benchmarks.compare.ours_offline"
        return _own_module(name, module, _engine_options(setup, tp))

    return specified


def _ours_served(way: str) -> Callable[[str, Setup], SubjectSpec]:
    def specified(name: str, setup: Setup) -> SubjectSpec:
        options = {"way": way, "serve": serve_options(_engine_options(setup, 1))}
        return _own_module(name, "benchmarks.compare.over_network", options)

    return specified


def serve_options(options: Mapping[str, object]) -> list[str]:
    """Options of EngineConfig as `lockstep serve` takes them."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


def _own_module(name: str, module: str, options: object) -> SubjectSpec:
    command = (sys.executable, "-m", module, json.dumps(options))
    return SubjectSpec(name=name, command=command, variables=QUIET, folder=ROOT, pauses=False)


def _transformers(batching: str) -> Callable[[str, Setup], SubjectSpec]:
    def specified(name: str, setup: Setup) -> SubjectSpec:
        options = {
            "model": str(setup.model),
            "batching": batching,
            "threads": setup.threads,
            "dtype": setup.places.dtype,
        }
        return _peer(name, Path(sys.executable), "transformers_offline.py", options, QUIET)

    return specified


def _vllm(tp: int) -> Callable[[str, Setup], SubjectSpec]:
    def specified(name: str, setup: Setup) -> SubjectSpec:
        python = _needed(name, "--vllm-python", setup.places.vllm_python)
        options = {
            "model": str(setup.model),
            "max_model_len": setup.max_model_len,
            "prefix_caching": setup.prefix_caching,
            "tp": tp,
            "dtype": setup.places.dtype,
        }
        return _peer(name, python, "vllm_offline.py", options, _vllm_variables(setup, tp))

    return specified


def _vllm_served(name: str, setup: Setup) -> SubjectSpec:
    python = _needed(name, "--vllm-python", setup.places.vllm_python)
    cache = "--enable-prefix-caching" if setup.prefix_caching else "--no-enable-prefix-caching"
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *(f"--model={setup.model}", "--served-model-name=model", f"--dtype={setup.places.dtype}"),
        *(f"--max-model-len={setup.max_model_len}", f"--max-num-seqs={MAX_NUM_SEQS}", cache),
        *("--host=127.0.0.1", "--port={port}", "--seed=0"),
    ]
    return _server(name, "vLLM, served", command, {}, _vllm_variables(setup, 1))


def _vllm_variables(setup: Setup, tp: int) -> dict[str, str]:
    # Each rank gets cores of its own.
    share = max(1, setup.threads // tp)
    firsts = range(0, share * tp, share)
    ranges = [f"{each}-{each + share - 1}" if share > 1 else f"{each}" for each in firsts]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(ranges),
        "VLLM_NO_USAGE_STATS": "1",
        **QUIET,
    }
    found = [Path(folder, file) for folder in LIBRARY_FOLDERS for file in TCMALLOC]
    if there := [str(path) for path in found if path.exists()]:
        variables["LD_PRELOAD"] = there[0]
    return variables


def _openvino(name: str, setup: Setup) -> SubjectSpec:
    python = _needed(name, "--openvino-python", setup.places.openvino_python)
    model = _needed(name, "--openvino-model", setup.places.openvino_model)
    options = {
        "model": str(model),
        "prefix_caching": setup.prefix_caching,
        "threads": setup.threads,
        "cache_gib": KV_GIB,
        "precision": setup.places.openvino_precision,
    }
    return _peer(name, python, "openvino_offline.py", options, {})


def _llama_cpp(name: str, setup: Setup) -> SubjectSpec:
    server = _needed(name, "--llama-server", setup.places.llama_server)
    gguf = _needed(name, "--gguf", setup.places.gguf)
    # It divides its context among its slots, and takes no option as --name=value.
    options = {
        "--model": gguf,
        "--alias": "model",
        "--threads": setup.threads,
        "--parallel": MAX_NUM_SEQS,
        "--ctx-size": MAX_NUM_SEQS * setup.max_model_len,
        "--host": "127.0.0.1",
        "--port": "{port}",
    }
    command = [str(server), *(str(part) for option in options.items() for part in option)]
    return _server(name, "llama.cpp", command, {"cache_prompt": setup.prefix_caching}, {})


def _server(
    name: str,
    engine: str,
    command: list[str],
    extra: Mapping[str, object],
    variables: Mapping[str, str],
) -> SubjectSpec:
    # `env` gives them to the server alone, not to our client.
    settings = [f"{key}={value}" for key, value in variables.items()]
    options = {
        "way": "http",
        "command": ["env", "-u", "PYTHONPATH", *settings, *command],
        "engine": engine,
        "model": "model",
        "extra": extra,
    }
    module = "benchmarks.compare.over_network"
    arguments = (sys.executable, "-m", module, json.dumps(options))
    return SubjectSpec(name=name, command=arguments, variables={}, folder=ROOT, pauses=True)


def _peer(
    name: str, python: Path, script: str, options: object, variables: Mapping[str, str]
) -> SubjectSpec:
    command = (str(python), str(PEERS / script), json.dumps(options))
    # Nothing of ours is for its interpreter.
    return SubjectSpec(
        name=name,
        command=command,
        variables={**variables, "PYTHONPATH": ""},
        folder=None,
        pauses=True,
    )


def _needed(name: str, option: str, value: Path | None) -> Path:
    if value is None:
        raise click.UsageError(f"{name} needs {option}")
    return value.absolute()


SUBJECTS: Mapping[str, Callable[[str, Setup], SubjectSpec]] = {
    "ours": _ours(1),
    "ours-tp2": _ours(2),
    "ours-grpc": _ours_served("grpc"),
    "ours-http": _ours_served("http"),
    "transformers": _transformers("static"),
    "transformers-cb": _transformers("continuous"),
    "vllm": _vllm(1),
    "vllm-tp2": _vllm(2),
    "vllm-http": _vllm_served,
    "openvino": _openvino,
    "llama.cpp": _llama_cpp,
}
