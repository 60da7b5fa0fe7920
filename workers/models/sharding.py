"""Cuts a model without weights into one rank's part."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.errors import ModelError
from workers.layers.embedding import shard_embedding
from workers.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    empty_part,
    method_of,
)
from workers.layers.paged_attention import HeadShard
from workers.models.plan import FIRST_RANK, HEAD_ROWS, PACKED_QKV, styles_of
from workers.parallel import Shard, TensorParallel

KEYS_AND_VALUES = frozenset({"k_proj", "v_proj", "key", "value"})
# What attention modules remember of their heads, and use to give tensors their shape.
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
HEAD_SIZES = ("all_head_size", "split_size", "embed_dim")
KV_SIZES = ("kv_dim",)


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a rank holds of a model."""

    # The part of each checkpoint tensor that this rank reads; one without an entry is whole.
    shards: dict[str, Shard] = field(default_factory=dict)
    # Of attention modules that all heads reach.
    heads: dict[nn.Module, HeadShard] = field(default_factory=dict)


def shard_model(model: PreTrainedModel, parallel: TensorParallel) -> Sharding:
    """Replaces what is cut.

    Raises ModelError: the model can't be cut over so many ranks.
    """
    if parallel.size == 1:
        return Sharding()
    check_heads(num_heads(model), parallel.size)
    return _Cutter(model, parallel).cut()


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
class _Heads:
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


class _Cutter:
    """One model on its way from whole to one rank's part."""

    def __init__(self, model: PreTrainedModel, parallel: TensorParallel) -> None:
        self._model = model
        self._parallel = parallel
        self._kind = type(model).__name__
        self._modules = dict(model.named_modules())
        self._ties = model.get_expanded_tied_weights_keys(all_submodels=True)
        self._sharding = Sharding()

    def cut(self) -> Sharding:
        styles = styles_of(self._model)
        heads = self._attention_heads(styles)
        done = self._cut_vocabulary()
        for name, style in styles.items():
            if name in done:
                continue
            if style == HEAD_ROWS:
                self._cut_head_rows(name, heads.get(name.rsplit(".", 2)[0]))
            elif name not in self._modules:
                self._cut_parameter(name, style)
            elif style in WRAPPERS:
                module = self._modules[name]
                module.__dict__["forward"] = WRAPPERS[style](module.forward, self._parallel)
            else:
                self._cut_linear(name, style, heads.get(name.rpartition(".")[0]))
        for name, own in heads.items():
            if self._modules[name] not in self._sharding.heads:
                _tell_heads(self._modules[name], own)
        self._cut_ties()
        return self._sharding

    def _attention_heads(self, styles: Mapping[str, str]) -> dict[str, _Heads]:
        """Heads of every module that attends and is cut; notes which get all heads."""
        projections: dict[str, list[str]] = {}
        for name in styles:
            parent = name.rpartition(".")[0]
            if "att" in parent.rpartition(".")[2] or parent.endswith(".self"):
                projections.setdefault(parent, []).append(name)
        heads = {name: self._heads(self._modules[name]) for name in projections}
        for name, own in heads.items():
            if all(styles[each] not in ("colwise", PACKED_QKV) for each in projections[name]):
                shard = HeadShard(query=own.own_query, key=own.own_key)
                self._sharding.heads[self._modules[name]] = shard
        return heads

    def _heads(self, attention: nn.Module) -> _Heads:
        config = getattr(attention, "config", None) or self._model.config.get_text_config()
        query = _first_number(attention, HEADS) or num_heads(self._model)
        head_dim = getattr(attention, "head_dim", None)
        keys = getattr(attention, "k_proj", None)
        if isinstance(keys, nn.Linear) and isinstance(head_dim, int):
            key = keys.out_features // head_dim
        else:
            key = (
                _first_number(attention, KV_HEADS)
                or getattr(config, "num_key_value_heads", None)
                or query
            )
        return _Heads(query, key, self._parallel.rank, self._parallel.size)

    def _cut_vocabulary(self) -> set[str]:
        """Cuts embedding and head by vocabulary; returns their names."""
        embedding = self._model.get_input_embeddings()
        head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        method = method_of(head)
        if not isinstance(embedding, nn.Embedding) or method is None:
            raise ModelError(
                f"{self._kind}: {type(embedding).__name__} and {type(head).__name__} can't be cut "
                "by vocabulary: serve it with --tp 1"
            )
        names = {module: name for name, module in self._modules.items()}
        shard = self._parallel.padded_shard(0, embedding.num_embeddings)
        shard_embedding(embedding, shard, self._parallel)
        self._sharding.shards[f"{names[embedding]}.weight"] = shard
        shard = self._parallel.padded_shard(0, method.features(head)[1])
        self._replace(names[head], ColumnParallelLinear(head, shard, method))
        return {names[embedding], names[head]}

    def _cut_linear(self, name: str, style: str, heads: _Heads | None) -> None:
        module = self._modules[name]
        method = method_of(module)
        if method is None:
            raise self._unbuilt(name, style)
        inputs, outputs = method.features(module)
        match style:
            case "colwise" | "packed_colwise" | "packed_qkv":
                shard = self._output_shard(name, style, outputs, heads)
                self._replace(name, ColumnParallelLinear(module, shard, method))
            case "colwise_gather_output" | "colwise_rep":
                shard = self._even(name, 0, outputs)
                layer = ColumnParallelLinear(module, shard, method, gather=self._parallel)
                self._replace(name, layer)
            case "rowwise" | "rowwise_split_input" | "rowwise_rep":
                takes_all = style == "rowwise_split_input" and heads is None
                shard = self._even(name, 1, inputs)
                self._replace(
                    name,
                    RowParallelLinear(module, shard, method, self._parallel, takes_all=takes_all),
                )
            case _:
                raise self._unbuilt(name, style)

    def _output_shard(self, name: str, style: str, outputs: int, heads: _Heads | None) -> Shard:
        if style == PACKED_QKV and heads is not None:
            dim = outputs // (heads.query + 2 * heads.key)
            starts = (0, heads.query, heads.query + heads.key)
            parts = (heads.own_query, heads.own_key, heads.own_key)
            ranges = tuple(
                ((first + start) * dim, (first + stop) * dim)
                for first, (start, stop) in zip(starts, parts, strict=True)
            )
            return Shard(dim=0, ranges=ranges, size=sum(stop - start for start, stop in ranges))
        if style == "packed_colwise":
            return self._halves(name, 0, outputs)
        if heads is not None and name.rpartition(".")[2] in KEYS_AND_VALUES:
            dim = outputs // heads.key
            start, stop = heads.own_key
            return Shard(dim=0, ranges=((start * dim, stop * dim),), size=(stop - start) * dim)
        return self._even(name, 0, outputs)

    def _cut_parameter(self, name: str, style: str) -> None:
        whole = self._model.get_parameter(name)
        if style == FIRST_RANK:
            stop = whole.shape[0] if self._parallel.rank == 0 else 0
            shard = Shard(dim=0, ranges=((0, stop),), size=whole.shape[0])
        elif style in ("colwise", "packed_colwise"):
            dim = max(whole.dim() - 2, 0)
            cut = self._halves if style.startswith("packed") else self._even
            shard = cut(name, dim, whole.shape[dim])
        elif style in ("rowwise", "packed_rowwise"):
            dim = whole.dim() - 1
            cut = self._halves if style.startswith("packed") else self._even
            shard = cut(name, dim, whole.shape[dim])
        else:
            raise self._unbuilt(name, style)
        self._replace_parameter(name, shard)

    def _cut_head_rows(self, name: str, heads: _Heads | None) -> None:
        if heads is None:
            return
        start, stop = heads.own_key if ".k_norm." in name else heads.own_query
        self._replace_parameter(name, Shard(dim=0, ranges=((start, stop),), size=stop - start))

    def _cut_ties(self) -> None:
        """What is one with something that was cut is cut like it."""
        shards = self._sharding.shards
        for one, other in (*self._ties.items(), *((b, a) for a, b in self._ties.items())):
            if one in shards and other not in shards:
                self._replace_parameter(other, shards[one])

    def _replace(self, name: str, layer: ColumnParallelLinear | RowParallelLinear) -> None:
        self._model.set_submodule(name, layer)
        for key, shard in layer.shards.items():
            self._sharding.shards[f"{name}.{key}"] = shard

    def _replace_parameter(self, name: str, shard: Shard) -> None:
        path, _, own = name.rpartition(".")
        part = empty_part(self._model.get_parameter(name), shard)
        self._model.get_submodule(path).register_parameter(own, part)
        self._sharding.shards[name] = shard

    def _even(self, name: str, dim: int, size: int) -> Shard:
        tp = self._parallel.size
        if size % tp:
            raise ModelError(
                f"{name}: {size} {'inputs' if dim else 'outputs'} can't be split over tp={tp} "
                f"ranks: use a tp that divides {size}"
            )
        return self._parallel.even_shard(dim, size)

    def _halves(self, name: str, dim: int, size: int) -> Shard:
        """Of two things that lie one after the other, this rank's part of each."""
        ((start, stop),) = self._even(name, dim, size // 2).ranges
        half = size // 2
        ranges = ((start, stop), (half + start, half + stop))
        return Shard(dim=dim, ranges=ranges, size=2 * (stop - start))

    def _unbuilt(self, name: str, style: str) -> ModelError:
        return ModelError(
            f"{self._kind}: its tensor-parallel plan cuts {name} by style {style!r}, which isn't "
            "built: serve it with --tp 1"
        )


class SummedForward:
    """Stands for the forward of a module whose outputs are a rank's part of a sum."""

    def __init__(self, forward: Callable[..., Any], parallel: TensorParallel) -> None:
        self._forward = forward
        self._parallel = parallel

    def __call__(self, *arguments: object, **keywords: object) -> torch.Tensor:
        return self._parallel.all_reduce(self._forward(*arguments, **keywords).contiguous())


class DividedForward:
    """Stands for the forward of a module that every rank runs whole, within a sum over ranks."""

    def __init__(self, forward: Callable[..., Any], parallel: TensorParallel) -> None:
        self._forward = forward
        self._size = parallel.size

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._forward(inputs)
        return output / self._size


WRAPPERS: Mapping[str, type[SummedForward] | type[DividedForward]] = {
    "moe_tp_experts": SummedForward,
    "all_reduce": SummedForward,
    "moe_identity_expert": DividedForward,
}


def _first_number(module: nn.Module, names: Sequence[str]) -> int | None:
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _tell_heads(attention: nn.Module, heads: _Heads) -> None:
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
