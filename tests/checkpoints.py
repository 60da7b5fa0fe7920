"""Checkpoints of tiny models, loaded without an executor, and what a rank should then hold."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from workers.loading.checkpoint import read_checkpoint
from workers.loading.conversion import Source
from workers.loading.naming import match_names
from workers.loading.weights import load_weights
from workers.parallel import Shard

Build = Callable[[], PreTrainedModel]


def build_meta(build: Build) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights():
        return build()


def save_random(build: Build, folder: Path, *, shard_size: str = "50GB") -> dict[str, torch.Tensor]:
    """Saves a random model as its makers would, experts apart; returns what it consists of."""
    model = build()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return dict(model.state_dict())


def match(model: PreTrainedModel, folder: Path, **options: object) -> dict[str, Source]:
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return match_names(model, shapes, read_checkpoint(folder), folder, **options)


def load(
    build: Build,
    folder: Path,
    shards: Mapping[str, Shard] | None = None,
    on_progress: Callable[[int, int], None] = lambda loaded, total: None,
    **options: object,
) -> dict[str, torch.Tensor]:
    """The tensors that a rank holds, tied ones under each name."""
    model = build_meta(build)
    load_weights(
        model,
        match(model, folder, **options),
        shards or {},
        device=torch.device("cpu"),
        num_threads=3,
        on_progress=on_progress,
    )
    return dict(model.state_dict())


def cut(whole: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """What a rank should hold of a tensor."""
    if shard is None:
        return whole
    parts = [whole.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges]
    padding = list(whole.shape)
    padding[shard.dim] = shard.size - shard.stored
    return torch.cat([*parts, whole.new_zeros(padding)], shard.dim)


def change_tensors(file: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces or adds tensors of one file; None removes one."""
    stored = load_file(file) | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, file)


def replace_stored(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replaces tensors in the files where they lie, and in the index; None removes one.

    A new one goes into the first file. Returns the file of the last.
    """
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places: dict[str, str] = content["weight_map"]
    first = min(places.values())
    for name, tensor in tensors.items():
        file = places.pop(name, first)
        change_tensors(folder / file, **{name: tensor})
        if tensor is not None:
            places[name] = file
    index.write_text(json.dumps(content))
    return folder / file


def change_header(file: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Lets `change` edit the header of a safetensors file; its data stays."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[end:])
