"""Heads of attention modules: how many the whole model has, and which are a rank's."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.errors import ModelError
from workers.parallel import TensorParallel

# What attention modules remember of their heads, and use to give tensors their shape.
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
HEAD_SIZES = ("all_head_size", "split_size", "embed_dim")
KV_SIZES = ("kv_dim",)


def num_heads(model: PreTrainedModel) -> int:
    """Query heads of the whole model. Raises ModelError: the configuration doesn't say."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ModelError(f"config.json: num_attention_heads={heads} must be a number")
    return heads


def check_heads(heads: int, tp: int) -> None:
    if heads % tp:
        raise ModelError(
            f"{heads} attention heads can't be split over tp={tp} ranks: use a tp that "
            f"divides {heads}"
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one attention module of the whole model, and of one rank."""

    query: int
    key: int
    rank: int
    tp: int

    def __post_init__(self) -> None:
        check_heads(self.query, self.tp)
        if self.key % self.tp and self.tp % self.key:
            raise ModelError(
                f"{self.key} KV heads can't be split over tp={self.tp} ranks: use a tp that "
                f"divides {self.key} or is a multiple of it"
            )

    @property
    def own_query(self) -> tuple[int, int]:
        part = self.query // self.tp
        return self.rank * part, (self.rank + 1) * part

    @property
    def own_key(self) -> tuple[int, int]:
        """Whole KV heads; one that several ranks hold where there are fewer heads than ranks."""
        if self.key % self.tp == 0:
            part = self.key // self.tp
            return self.rank * part, (self.rank + 1) * part
        head = self.rank * self.key // self.tp
        return head, head + 1


def heads_of(model: PreTrainedModel, attention: nn.Module, parallel: TensorParallel) -> Heads:
    """Those of one attention module. Raises ModelError: they can't be split over so many ranks."""
    config = getattr(attention, "config", None) or model.config.get_text_config()
    query = _first_number(attention, HEADS) or num_heads(model)
    head_dim = getattr(attention, "head_dim", None)
    keys = getattr(attention, "k_proj", None)
    if isinstance(keys, nn.Linear) and isinstance(head_dim, int):
        key = keys.out_features // head_dim
    else:
        named = _first_number(attention, KV_HEADS)
        key = named or getattr(config, "num_key_value_heads", None) or query
    return Heads(query, key, parallel.rank, parallel.size)


def _first_number(module: nn.Module, names: Sequence[str]) -> int | None:
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def tell_heads(attention: nn.Module, heads: Heads) -> None:
    """Makes an attention module reckon with this rank's heads."""
    own = {
        **dict.fromkeys(HEADS, (heads.query, heads.own_query)),
        **dict.fromkeys(KV_HEADS, (heads.key, heads.own_key)),
    }
    for name, (whole, (start, stop)) in own.items():
        if getattr(attention, name, None) == whole:
            setattr(attention, name, stop - start)
    for names, (whole, (start, stop)) in (
        (HEAD_SIZES, (heads.query, heads.own_query)),
        (KV_SIZES, (heads.key, heads.own_key)),
    ):
        for name in names:
            size = getattr(attention, name, None)
            if isinstance(size, int):
                setattr(attention, name, size // whole * (stop - start))
    config = getattr(attention, "config", None)
    if isinstance(config, PreTrainedConfig):
        mine = copy.copy(config)
        mine.num_attention_heads = heads.own_query[1] - heads.own_query[0]
        if getattr(config, "num_key_value_heads", None) is not None:
            mine.num_key_value_heads = heads.own_key[1] - heads.own_key[0]
        attention.__dict__["config"] = mine
