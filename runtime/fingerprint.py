"""Tells whether two engines give the same tokens, so that one can go on where the other ended.

Reading all weights at each start would take minutes: of each tensor a few places are read. What
trains a tensor changes it nearly everywhere.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from runtime.errors import ConfigError
from runtime.sampling_params import SamplingDefaults

logger = logging.getLogger(__name__)

# Goes up with each change after which the same request with the same seed gets other tokens:
# noise, order of the sampling steps, seeds of choices, what a structure allows.
SAMPLING_VERSION = 1
# Of each tensor so many places, of so many bytes each, from its first to its last.
NUM_PLACES = 4
PLACE_BYTES = 4096
# Mistral's own copy of the weights, which isn't read where there is another.
OWN_FORMAT = "consolidated"
LENGTH = 32  # of the fingerprint, in hexadecimal digits


def model_fingerprint(
    folder: Path,
    dtype: str,
    *,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    eos_token_ids: Collection[int],
    defaults: SamplingDefaults,
) -> str:
    """Of the model in `folder`, wherever that lies, as it is served.

    `dtype`, `quantization` and `kv_cache_dtype` are the options, `defaults` are of what requests
    leave unset. On how many ranks it runs doesn't enter. Raises ConfigError: a file can't be read.
    """
    digest = hashlib.sha256()
    try:
        served = {
            "sampling_version": SAMPLING_VERSION,
            "dtype": _dtype_in_effect(folder / "config.json", dtype),
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "eos_token_ids": sorted(eos_token_ids),
            "defaults": asdict(defaults),
        }
        _add(digest, json.dumps(served, sort_keys=True).encode())
        for name in ("config.json", "tokenizer.json"):
            path = folder / name
            _add(digest, path.read_bytes() if path.is_file() else b"")
        files = _weight_files(folder)
        for file in files:
            _add(digest, file.name.encode())
            for part in _parts_of(file):
                _add(digest, part)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"no fingerprint can be made of the model in {folder}: {type(error).__name__}: {error}"
        ) from error
    if not files:
        logger.warning(
            "%s has no safetensors on this host: models with other weights look like this one, "
            "and requests may go on with the wrong one",
            folder,
        )
    return digest.hexdigest()[:LENGTH]


def _add(digest: Any, part: bytes) -> None:
    """With its length: else the end of one and the beginning of the next could change places."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _dtype_in_effect(path: Path, dtype: str) -> str:
    """What auto stands for, where config.json says the same in all its parts; else auto itself."""
    if dtype != "auto":
        return dtype
    config = json.loads(path.read_text(encoding="utf-8"))
    parts = [config, *(each for each in config.values() if isinstance(each, dict))]
    named = [each.get("dtype") or each.get("torch_dtype") for each in parts]
    if named[0] is not None and set(named) <= {named[0], None}:
        return str(named[0])
    return dtype


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith(OWN_FORMAT)] or files


def _parts_of(file: Path) -> Iterator[bytes]:
    """A file's header, its size, and of each tensor a few places."""
    with file.open("rb") as stream:
        start = stream.read(8)
        header = stream.read(int.from_bytes(start, "little"))
        yield header
        yield file.stat().st_size.to_bytes(8, "little")
        offset = len(start) + len(header)
        for name, tensor in sorted(json.loads(header).items()):
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                yield from _places_of(stream, offset + first, end - first)


def _places_of(stream: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    if size <= NUM_PLACES * PLACE_BYTES:
        stream.seek(offset)
        yield stream.read(size)
        return
    for place in range(NUM_PLACES):
        stream.seek(offset + place * (size - PLACE_BYTES) // (NUM_PLACES - 1))
        yield stream.read(PLACE_BYTES)
