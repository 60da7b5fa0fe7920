"""Runs transformers' converters, which make a model's tensors of the ones that are stored.

Most only move elements (experts stacked, gate and up joined, qkv split): those run on tensors that
aren't read yet, and each rank reads its part of the outcome. The others are run on the stored
tensors themselves, as a whole on every rank, which costs the memory of one group of tensors.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from workers.loading.checkpoint import StoredTensor
from workers.loading.unread import UnreadTensor


class WholeModel:
    """What converters ask a model for; stays as it is when the model is cut."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self.tensors: Mapping[str, torch.Tensor] = dict(model.state_dict())  # on the meta device

    def get_parameter(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise AttributeError(f"the model has no {name}")
        return self.tensors[name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """One group of stored tensors, and the converter that makes tensors of the model of them."""

    target: str  # the first of them
    converter: WeightConverter  # as transformers gave it: copied for every run
    members: list[tuple[str, StoredTensor]]  # the source pattern that each matches
    model: WholeModel

    @property
    def dtype(self) -> torch.dtype:
        """The target's: transformers converts in it, whatever is stored."""
        return self.model.tensors[self.target].dtype

    def run(self, tensors: Iterable[Any]) -> dict[str, Any]:
        """Tensors of the model by name, made of the members' in their order.

        Raises what the converter raises where they don't fit it.
        """
        converter = deepcopy(self.converter)
        for (pattern, stored), tensor in zip(self.members, tensors, strict=True):
            converter.add_tensor(self.target, stored.name, pattern, tensor)
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A tensor of the model that a conversion has to be run for."""

    name: str
    shape: tuple[int, ...]
    conversion: Conversion


# Where a tensor of the model comes from.
Source = UnreadTensor | Converted


def plan(conversion: Conversion) -> dict[str, Source]:
    """What the conversion will give, by name; nothing is read.

    Raises what the converter raises where the members don't fit it.
    """
    try:
        moved = conversion.run(UnreadTensor.whole(stored) for _, stored in conversion.members)
        if all(isinstance(tensor, UnreadTensor) for tensor in moved.values()):
            return moved
    except (AttributeError, TypeError):
        # It does more than move elements, so an unread tensor isn't enough.
        pass
    empty = [
        torch.empty(stored.shape, dtype=conversion.dtype, device="meta")
        for _, stored in conversion.members
    ]
    return {
        name: Converted(name=name, shape=tuple(tensor.shape), conversion=conversion)
        for name, tensor in conversion.run(empty).items()
    }
