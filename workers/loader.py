"""Weights from safetensors files: checked as a whole first, then read slice by slice."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from workers.errors import ModelError
from workers.parallel import Shard

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Frequencies that old checkpoints store and models compute themselves.
HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
MAX_NAMED = 5
ROWS = 1024  # read at a time where two tensors are compared

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor of the checkpoint is."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    item_bytes: int


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by its stored name; reads headers only.

    Raises ModelError naming the file: missing, truncated, or not safetensors.
    """
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        old = sorted(path.name for path in folder.glob("*.bin"))
        advice = f": convert {old[0]} to safetensors" if old else ""
        raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}{advice}")
    weight_map = _read_index(folder / INDEX)
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise ModelError(f"{folder / file} is missing: {INDEX} names it")
        headers[file] = _read_header(folder / file)
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ModelError(f"{folder / file} lacks tensor {name}, which {INDEX} puts there")
    return {name: headers[file][name] for name, file in weight_map.items()}


def match_names(
    model: PreTrainedModel,
    shapes: Mapping[str, torch.Size],
    stored: Mapping[str, StoredTensor],
    folder: Path,
) -> dict[str, StoredTensor]:
    """Where each tensor of the model comes from, by its name in the model.

    `shapes` are those of the whole model, on the meta device. A tied tensor appears once. Raises
    ModelError: a tensor is missing, unknown or of another shape.
    """
    sources = _rename(model, shapes, stored)
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    for target, source in ties.items():
        alias = sources.pop(target, None)
        if alias is not None and _differ(alias, sources.setdefault(source, alias)):
            raise ModelError(
                f"{alias.file}: {alias.name} differs from {sources[source].name}, but config.json "
                "makes them one: set its tie_word_embeddings to false"
            )
    _refuse("lacks", set(shapes) - set(ties) - set(sources), folder)
    ignored = [HARMLESS, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    unknown = set(sources) - set(shapes)
    _refuse(
        f"has tensors that {type(model).__name__} doesn't know:",
        {name for name in unknown if not any(pattern.search(name) for pattern in ignored)},
        folder,
    )
    matched = {name: source for name, source in sources.items() if name in shapes}
    for name, source in matched.items():
        if source.shape != tuple(shapes[name]):
            raise ModelError(
                f"{source.file}: {source.name} has shape {list(source.shape)}, "
                f"but config.json makes it {list(shapes[name])}"
            )
    return matched


def load_weights(
    model: PreTrainedModel,
    sources: Mapping[str, StoredTensor],
    shards: Mapping[str, Shard],
    *,
    device: torch.device,
    on_progress: Progress,
) -> None:
    """Reads this rank's part of every tensor into the model; tells (bytes read, bytes in all).

    Every tensor gets the dtype that it has in the model without weights. Raises ModelError: a
    file is damaged.
    """
    total = sum(_bytes_to_read(source, shards.get(name)) for name, source in sources.items())
    loaded = 0
    on_progress(loaded, total)
    by_file: dict[Path, list[str]] = {}
    for name, source in sources.items():
        by_file.setdefault(source.file, []).append(name)
    for file, names in by_file.items():
        with _open(file) as reader:
            for name in names:
                source, shard = sources[name], shards.get(name)
                _assign(model, name, _read(reader, source, shard), device)
                loaded += _bytes_to_read(source, shard)
                on_progress(loaded, total)
    model.tie_weights()


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{file} can't be read: {error}; fetch it again") from error


def _read(reader: Any, source: StoredTensor, shard: Shard | None) -> torch.Tensor:
    """A tensor of its own: a view would keep the file mapped, or the whole tensor alive."""
    if shard is None:
        whole: torch.Tensor = reader.get_tensor(source.name)
        return whole.clone()
    stored = reader.get_slice(source.name)
    before = (slice(None),) * shard.dim
    parts = [stored[(*before, slice(start, stop))] for start, stop in shard.ranges]
    shape = list(source.shape)
    shape[shard.dim] = shard.size
    padded: torch.Tensor = parts[0].new_zeros(shape)
    torch.cat(parts, shard.dim, out=padded.narrow(shard.dim, 0, shard.stored))
    return padded


def _assign(model: nn.Module, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    empty = module._parameters.get(own)
    if empty is not None:
        tensor = tensor.to(device=device, dtype=empty.dtype)
        module._parameters[own] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[own] = tensor.to(device=device, dtype=module.get_buffer(own).dtype)


def _differ(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of a checkpoint have other values, looking at a few rows at a time."""
    if one == other:
        return False
    if one.shape != other.shape:
        return True
    with _open(one.file) as mine, _open(other.file) as theirs:
        pair = mine.get_slice(one.name), theirs.get_slice(other.name)
        for start in range(0, one.shape[0], ROWS):
            first, second = (rows[start : start + ROWS] for rows in pair)
            if not torch.equal(first, second.to(first.dtype)):
                return True
    return False


def _rename(
    model: PreTrainedModel, shapes: Mapping[str, torch.Size], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The checkpoint under the names of the installed transformers."""
    mapping = get_model_conversion_mapping(model)
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    renamed: dict[str, StoredTensor] = {}
    for key, source in stored.items():
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, dict(shapes)
        )
        if pattern is not None:
            raise ModelError(
                f"{source.file}: {key} must be merged with others to fit {type(model).__name__}, "
                "which isn't built"
            )
        if name in renamed:
            raise ModelError(f"{source.file}: {renamed[name].name} and {key} are both {name}")
        renamed[name] = source
    return renamed


def _bytes_to_read(source: StoredTensor, shard: Shard | None) -> int:
    shape = list(source.shape)
    if shard is not None:
        shape[shard.dim] = shard.stored
    return math.prod(shape) * source.item_bytes


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The header of a safetensors file (format: huggingface/safetensors, README)."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{file} is truncated or not safetensors: its header doesn't fit")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            tensors = {name: _stored_tensor(file, name, entry) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ModelError(f"{file} isn't safetensors: its header can't be read") from error
    if size != 8 + length + end:
        raise ModelError(
            f"{file} has {size} bytes where its header asks for {8 + length + end}: it is "
            "truncated or damaged; fetch it again"
        )
    return tensors


def _stored_tensor(file: Path, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    if entry["dtype"] not in ITEM_BYTES:
        raise ModelError(
            f"{file}: {name} is stored as {entry['dtype']}, must be one of {', '.join(ITEM_BYTES)}"
        )
    return StoredTensor(
        file=file,
        name=name,
        shape=tuple(map(int, entry["shape"])),
        item_bytes=ITEM_BYTES[entry["dtype"]],
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} can't be read: it must hold a weight_map") from error
    for _, file in pairs:
        if Path(file).name != file:
            raise ModelError(f"{path} names {file!r}: it must be a file of the same folder")
    return dict(pairs)


def _refuse(what: str, names: set[str], folder: Path) -> None:
    if not names:
        return
    listed = ", ".join(sorted(names)[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    raise ModelError(f"the checkpoint in {folder} {what} {listed}{more}")
