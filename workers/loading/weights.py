"""Reads one rank's part of the weights into its model, a stored tensor at a time."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from workers.errors import ModelError
from workers.layers.fp8 import FP8, Fp8Weights
from workers.loading.checkpoint import StoredTensor
from workers.loading.conversion import Conversion, Source
from workers.loading.quantising import quantise_into
from workers.loading.unread import Piece, UnreadTensor, cut
from workers.parallel import Shard

NOISE = 0.02  # standard deviation, as models begin with
ROWS = 1024  # read at a time where two tensors are compared

Progress = Callable[[int, int], None]


def load_weights(
    model: PreTrainedModel,
    sources: Mapping[str, Source],
    shards: Mapping[str, Shard],
    *,
    device: torch.device,
    num_threads: int,
    on_progress: Progress,
) -> None:
    """Reads this rank's part of every tensor into the model; tells (bytes read, bytes in all).

    Every tensor gets the dtype that it has in the model without weights. Beside this rank's part
    there is in memory at most a slice of one stored tensor for each thread, and one group that is
    converted as a whole. Raises ModelError: a file is damaged.
    """
    readings = _plan(sources, shards)
    total = sum(reading.num_bytes for reading in readings)
    files = _Files(file for reading in readings for file in reading.files)
    loaded = 0
    on_progress(loaded, total)
    load = partial(_load, model, sources=sources, shards=shards, files=files, device=device)
    with ThreadPoolExecutor(num_threads, "load") as pool:
        loading = {pool.submit(load, reading): reading.num_bytes for reading in readings}
        try:
            for done in as_completed(loading):
                done.result()
                loaded += loading[done]
                on_progress(loaded, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    model.tie_weights()


def fill_with_noise(
    model: PreTrainedModel, shards: Mapping[str, Shard], device: torch.device
) -> None:
    """Gives a model without weights some that it runs with: its speed is that of real ones."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = {**dict(model.named_parameters()), **model.state_dict()}
    for name, empty in tensors.items():
        shard = shards.get(name)
        size = list(empty.shape)
        if shard is not None:
            size[shard.dim] = shard.stored
        place = _allocate(model, name, tuple(size), shard, device)
        if place.is_floating_point() and place.ndim > 1:
            # Numbers of 8 bits are made of others.
            noise = place if place.itemsize > 1 else torch.empty_like(place, dtype=torch.bfloat16)
            place.copy_(noise.normal_(std=NOISE, generator=generator))
        else:
            place.fill_(1)
    model.tie_weights()


def differ(one: UnreadTensor, other: UnreadTensor) -> bool:
    """Whether two tensors of a checkpoint have other values, looking at a few rows at a time.

    Raises ModelError: a file is damaged.
    """
    if one == other:
        return False
    if one.shape != other.shape:
        return True
    files = _Files(piece.stored.file for piece in (*one.pieces, *other.pieces))
    dtype = one.pieces[0].stored.dtype
    for start in range(0, one.shape[0], ROWS):
        length = min(ROWS, one.shape[0] - start)
        rows = [torch.empty(length, *one.shape[1:], dtype=dtype) for _ in range(2)]
        for target, tensor in zip(rows, (one, other), strict=True):
            _fill(target, tensor.narrow(0, start, length), files)
        if not torch.equal(*rows):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What is read at once: one tensor of the model, or all that one conversion makes."""

    names: list[str]
    files: frozenset[Path]
    num_bytes: int
    conversion: Conversion | None = None


def _plan(sources: Mapping[str, Source], shards: Mapping[str, Shard]) -> list[_Reading]:
    readings: list[_Reading] = []
    converted: dict[Conversion, list[str]] = {}
    for name, source in sources.items():
        if isinstance(source, UnreadTensor):
            part = cut(source, shards.get(name))
            files = frozenset(piece.stored.file for piece in part.pieces)
            readings.append(_Reading(names=[name], files=files, num_bytes=part.num_bytes))
        else:
            converted.setdefault(source.conversion, []).append(name)
    readings += [
        _Reading(
            names=names,
            files=frozenset(stored.file for _, stored in conversion.members),
            num_bytes=sum(stored.num_bytes for _, stored in conversion.members),
            conversion=conversion,
        )
        for conversion, names in converted.items()
    ]
    # File after file, so that few are open at a time.
    return sorted(readings, key=lambda reading: sorted(reading.files))


def _load(
    model: nn.Module,
    reading: _Reading,
    *,
    sources: Mapping[str, Source],
    shards: Mapping[str, Shard],
    files: "_Files",
    device: torch.device,
) -> None:
    with nullcontext() if reading.conversion is None else files.converting:
        converted = {} if reading.conversion is None else _convert(reading.conversion, files)
        for name in reading.names:
            shard = shards.get(name)
            whole = converted.get(name, sources[name])
            part = cut(whole, shard)
            place = _allocate(model, name, part.shape, shard, device)
            layer = model.get_submodule(name.rpartition(".")[0])
            method = getattr(layer, "method", None)
            if isinstance(method, Fp8Weights) and place.dtype == FP8:
                scale = torch.empty(place.shape[method.output_dim], device=device)
                layer.register_parameter("scale", nn.Parameter(scale, requires_grad=False))
                read = partial(_fill, files=files)
                quantise_into(place, scale, whole, shard, output_dim=method.output_dim, read=read)
            else:
                _fill(place, part, files)
    files.release(reading.files)


def _allocate(
    model: nn.Module,
    name: str,
    shape: tuple[int, ...],
    shard: Shard | None,
    device: torch.device,
) -> torch.Tensor:
    """Puts a tensor that holds `shape`, and zeros behind it, into the model; returns its place."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    empty = module._parameters.get(own)
    dtype = (module.get_buffer(own) if empty is None else empty).dtype
    size = list(shape)
    if shard is not None:
        size[shard.dim] = shard.size
    tensor = torch.empty(size, dtype=dtype, device=device)
    if empty is None:
        module._buffers[own] = tensor
    else:
        module._parameters[own] = nn.Parameter(tensor, requires_grad=False)
    if shard is None:
        return tensor
    tensor.narrow(shard.dim, shard.stored, shard.size - shard.stored).zero_()
    return tensor.narrow(shard.dim, 0, shard.stored)


def _fill(target: torch.Tensor, part: torch.Tensor | UnreadTensor, files: "_Files") -> None:
    if isinstance(part, torch.Tensor):
        target.copy_(part)
        return
    for piece in part.pieces:
        place = tuple(slice(axis.start, axis.start + axis.length) for axis in piece.axes)
        target[place].copy_(_view(piece, files.tensor(piece.stored)))


def _view(piece: Piece, stored: torch.Tensor) -> torch.Tensor:
    """The piece's elements in the stored tensor, as its axes order them: nothing is copied."""
    order: list[int] = []
    for axis in piece.axes:
        if axis.stored_dim is not None:
            stored = stored.narrow(axis.stored_dim, axis.stored_start, axis.length)
            order.append(axis.stored_dim)
    view = stored.permute(order)
    for dim, axis in enumerate(piece.axes):
        if axis.stored_dim is None:
            view = view.unsqueeze(dim)
    return view


def _convert(conversion: Conversion, files: "_Files") -> dict[str, Any]:
    return conversion.run(
        files.tensor(stored).to(conversion.dtype) for _, stored in conversion.members
    )


class _Files:
    """Files that are mapped into memory while something is left to read of them."""

    def __init__(self, uses: Iterable[Path]) -> None:
        self.converting = threading.Lock()  # what is converted has a copy in memory
        self._uses = Counter(uses)
        self._open: dict[Path, Any] = {}
        self._lock = threading.Lock()

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """A view of the file: its pages are the system's, to be dropped at will.

        Raises ModelError: the file can't be read.
        """
        try:
            with self._lock:
                if stored.file not in self._open:
                    self._open[stored.file] = safe_open(stored.file, framework="pt")
                file = self._open[stored.file]
            tensor: torch.Tensor = file.get_tensor(stored.name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{stored.file} can't be read: {error}; fetch it again") from error
        return tensor

    def release(self, files: Iterable[Path]) -> None:
        """Counts one use of each; the last unmaps it."""
        with self._lock:
            self._uses.subtract(files)
            for file in files:
                if self._uses[file] == 0:
                    self._open.pop(file, None)
