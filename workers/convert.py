"""Turns a GGUF file into a Hugging Face folder: `python -m workers.convert --help`.

Weights are dequantised and stored in bfloat16, the number format that nearly all models are
published in. The folder appears under its name only when it is complete.
"""

import argparse
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from workers.caller import end_with_caller
from workers.errors import ModelError
from workers.gguf.decoder import write_decoder
from workers.gguf.endings import write_generation_config
from workers.gguf.file import GgufFile, open_gguf
from workers.gguf.gemma3 import ARCHITECTURE as GEMMA3
from workers.gguf.gemma3 import write_gemma3
from workers.gguf.metadata import check_metadata

DONE = "done: "  # how messages begin, unlike what libraries print
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def convert(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    on_message: Callable[[str], None],
) -> None:
    """Writes config.json, generation_config.json, tokenizer files and safetensors files.

    Everything goes into a sibling folder first, so a killed conversion leaves nothing that looks
    finished; of two conversions at once the first to finish stays.
    Raises ModelError: `source` is no GGUF file that can be converted, or `target` exists.
    """
    if target.exists():
        raise ModelError(f"{target} already exists: remove it or name another folder")
    gguf = open_gguf(source)
    check_metadata(gguf)
    _check_whole(gguf)
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_room(gguf, target.parent, dtype)
    unfinished = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        write = write_gemma3 if gguf["general.architecture"] == GEMMA3 else write_decoder
        write(gguf, unfinished, dtype=dtype, on_message=on_message)
        write_generation_config(gguf, unfinished)
        _share(unfinished)
        _publish(unfinished, target)
    except SafetensorError as error:  # a full disk, too
        raise ModelError(f"{gguf.path} can't be written to {target}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    on_message(f"{len(gguf.tensors)} tensors written")


def _check_whole(gguf: GgufFile) -> None:
    if (count := gguf.metadata.get("split.count", 1)) > 1:
        raise ModelError(
            f"{gguf.path}: split.count={count} must be 1: it is one of {count} files of a model; "
            "join them with llama.cpp's llama-gguf-split --merge"
        )
    if not gguf.tensors:
        raise ModelError(f"{gguf.path}: the file holds no tensors")


def _check_room(gguf: GgufFile, folder: Path, dtype: torch.dtype) -> None:
    needed = sum(tensor.num_values for tensor in gguf.tensors.values()) * dtype.itemsize
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"{gguf.path} becomes {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free"
        )


def _share(folder: Path) -> None:
    """Gives all files the mode that the umask gives: safetensors' are the owner's alone."""
    mode = (folder / "generation_config.json").stat().st_mode
    for file in folder.iterdir():
        file.chmod(mode)


def _publish(unfinished: Path, target: Path) -> None:
    try:
        unfinished.rename(target)
    except OSError:
        # A conversion that ran at the same time was faster, and its folder is complete too.
        if not (target / "config.json").is_file():
            raise


def _tell(message: str) -> None:
    try:
        print(f"{DONE}{message}", flush=True)
    except BrokenPipeError:
        # Nobody listens any more; what is converted is of use to the next one who asks for it.
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())  # else the flush at exit would fail again


def main() -> None:
    """The command. Exits with 1 and one sentence where the file can't be converted."""
    parser = argparse.ArgumentParser(prog="python -m workers.convert", description=__doc__)
    parser.add_argument("source", type=Path, help="GGUF file of a decoder")
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="stored number format")
    arguments = parser.parse_args()
    end_with_caller()
    # The default action would skip the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        convert(
            arguments.source,
            arguments.target,
            dtype=DTYPES[arguments.dtype],
            on_message=_tell,
        )
    except (ModelError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
