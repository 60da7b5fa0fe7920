"""The files of a checkpoint: which tensors are stored where. Reads headers, never weights."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A second copy of the weights, under other names, that Mistral puts beside the first.
OWN_FORMAT = "consolidated"
PICKLES = (".bin", ".pt", ".pth")
MAX_HEADER_BYTES = 100_000_000  # what safetensors' own reader allows
MAX_NAMED = 5

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
INTEGERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FORMATS_BY_BITS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
BITS = {name: bits for bits, names in FORMATS_BY_BITS.items() for name in names.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor of the checkpoint is."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    format: str  # a key of BITS

    @property
    def dtype(self) -> torch.dtype:
        """Only of the formats in FLOATS and INTEGERS."""
        return (FLOATS | INTEGERS)[self.format]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.format] // 8


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by its stored name; reads headers only.

    The weights are in model.safetensors, else in the files that model.safetensors.index.json names,
    else in the folder's only *.safetensors file, whatever its name. Files named consolidated*,
    Mistral's own copy, count only where there is no other.

    Raises ModelError naming the file: missing, truncated, damaged, or not safetensors.
    """
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        return _read_header(_only_file(folder))
    weight_map = _read_index(folder / INDEX)
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise ModelError(f"{folder / file} is missing: {INDEX} names it")
        headers[file] = _read_header(folder / file)
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ModelError(f"{folder / file} lacks tensor {name}, which {INDEX} puts there")
    # A tensor that the index forgot is one of the checkpoint all the same: known or refused.
    stored = {name: tensor for header in headers.values() for name, tensor in header.items()}
    return stored | {name: headers[file][name] for name, file in weight_map.items()}


def list_some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    candidates = [file for file in files if not file.name.startswith(OWN_FORMAT)] or files
    if len(candidates) == 1:
        return candidates[0]
    nothing = f"{folder} has neither {SINGLE} nor {INDEX}"
    if candidates:
        listed = list_some([file.name for file in candidates])
        raise ModelError(f"{nothing}, and several files: {listed}: add the index, or keep one")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    raise ModelError(nothing + (_advice(folder, pickles[0]) if pickles else ""))


def _advice(folder: Path, file: str) -> str:
    """How to convert a checkpoint of the old kind."""
    # Other names transformers wouldn't find.
    rename = "" if file.startswith("pytorch_model") else "rename it to pytorch_model.bin and "
    return (
        f": {file} is a pickle, which may run code when it is read: if you trust it, {rename}"
        f'convert it by python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The header of a safetensors file (format: huggingface/safetensors, README)."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{file} is truncated or not safetensors: its header doesn't fit")
        if length > MAX_HEADER_BYTES:
            raise ModelError(
                f"{file} isn't safetensors: a header of {length} bytes must be at most "
                f"{MAX_HEADER_BYTES}"
            )
        try:
            entries = list(_parse_header(file, stream.read(length)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file} isn't safetensors: its header can't be read") from error
    _check_places(file, entries, size - 8 - length)
    return {tensor.name: tensor for tensor, _, _ in entries}


def _parse_header(file: Path, text: bytes) -> Iterator[tuple[StoredTensor, int, int]]:
    """Tensors, and where their bytes begin and end behind the header."""
    header = json.loads(text)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        form = entry["dtype"]
        if form not in BITS:
            raise ModelError(f"{file}: {name} has dtype {form}, must be one of {', '.join(BITS)}")
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
            raise ValueError(f"{name}: sizes and offsets must be natural numbers")
        yield StoredTensor(file=file, name=name, shape=shape, format=form), begin, end


def _check_places(
    file: Path, entries: Sequence[tuple[StoredTensor, int, int]], available: int
) -> None:
    """Raises ModelError: a tensor has another size than its shape, or isn't alone in its place."""
    place = 0
    for tensor, begin, end in sorted(entries, key=lambda entry: entry[1:]):
        needed = math.prod(tensor.shape) * BITS[tensor.format]
        if (end - begin) * 8 != needed:
            raise ModelError(
                f"{file}: {tensor.name} has {end - begin} bytes, but shape {list(tensor.shape)} "
                f"in {tensor.format} makes {needed / 8:g}: the file is damaged; fetch it again"
            )
        if begin != place:
            raise ModelError(
                f"{file}: {tensor.name} begins at byte {begin}, must at {place}, where the tensor "
                "before it ends: the file is damaged; fetch it again"
            )
        if end > available:
            raise ModelError(
                f"{file} is truncated: of {end} bytes up to the end of {tensor.name} it has "
                f"{available}; fetch it again"
            )
        place = end
    if place != available:
        raise ModelError(
            f"{file} has {available - place} bytes behind its last tensor: it is damaged; fetch it "
            "again"
        )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} can't be read: it must hold a weight_map") from error
    for _, file in pairs:
        if Path(file).name != file:
            raise ModelError(f"{path} names {file!r}: it must be a file of the same folder")
    return dict(pairs)


def main_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The format of most of the checkpoint's floating-point bytes; float32 where it has none."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored.values():
        if tensor.format in FLOATS:
            sizes[tensor.dtype] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32
