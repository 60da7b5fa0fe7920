"""Cuts a model without weights into one rank's part."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from workers.errors import ModelError
from workers.layers.embedding import shard_embedding
from workers.layers.linear import (
    ColumnParallelLinear,
    LinearMethod,
    RowParallelLinear,
    empty_part,
)
from workers.layers.linear_methods import LinearMethods
from workers.layers.paged_attention import HeadShard
from workers.layers.partial import DividedForward, SummedForward
from workers.models.heads import Heads, check_heads, heads_of, num_heads, tell_heads
from workers.models.plan import FIRST_RANK, HEAD_ROWS, PACKED_QKV, styles_of
from workers.parallel import Shard, TensorParallel

PLAIN = LinearMethods()
KEYS_AND_VALUES = frozenset({"k_proj", "v_proj", "key", "value"})
WRAPPERS: Mapping[str, type[SummedForward] | type[DividedForward]] = {
    "moe_tp_experts": SummedForward,
    "all_reduce": SummedForward,
    "moe_identity_expert": DividedForward,
}


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a rank holds of a model."""

    # The part of each checkpoint tensor that this rank reads; one without an entry is whole.
    shards: dict[str, Shard] = field(default_factory=dict)
    # Of attention modules that all heads reach.
    heads: dict[nn.Module, HeadShard] = field(default_factory=dict)


def shard_model(
    model: PreTrainedModel, parallel: TensorParallel, methods: LinearMethods = PLAIN
) -> Sharding:
    """Replaces what is cut, and linear layers that stay whole where `methods` want it.

    Raises ModelError: the model can't be cut over so many ranks.
    """
    sharding = Sharding()
    if parallel.size > 1:
        check_heads(num_heads(model), parallel.size)
        sharding = _Cutter(model, parallel, methods).cut()
    if methods.replace_all:
        _replace_whole(model, methods)
    return sharding


def check_quantisable(model: PreTrainedModel) -> None:
    """Raises ModelError: most of the model may lie outside its linear layers."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 2:
            path = name.rpartition(".")[0]
            kind = type(model.get_submodule(path)).__name__
            raise ModelError(
                f"{type(model).__name__}: quantization=fp8 covers linear layers, and {kind} "
                f"({path}) has weights of its own: serve it with --quantization none"
            )


def _replace_whole(model: PreTrainedModel, methods: LinearMethods) -> None:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, module in list(model.named_modules()):
        method: LinearMethod | None = methods.of(module)
        if module is head:
            method = methods.of_head(module)
        if method is not None:
            outputs = method.features(module)[1]
            whole = Shard(dim=0, ranges=((0, outputs),), size=outputs)
            model.set_submodule(name, ColumnParallelLinear(module, whole, method))


class _Cutter:
    """One model on its way from whole to one rank's part."""

    def __init__(
        self, model: PreTrainedModel, parallel: TensorParallel, methods: LinearMethods
    ) -> None:
        self._model = model
        self._parallel = parallel
        self._methods = methods
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
                tell_heads(self._modules[name], own)
        self._cut_ties()
        return self._sharding

    def _attention_heads(self, styles: Mapping[str, str]) -> dict[str, Heads]:
        """Heads of every module that attends and is cut; notes which get all heads."""
        projections: dict[str, list[str]] = {}
        for name in styles:
            parent = name.rpartition(".")[0]
            if "att" in parent.rpartition(".")[2] or parent.endswith(".self"):
                projections.setdefault(parent, []).append(name)
        heads = {
            name: heads_of(self._model, self._modules[name], self._parallel) for name in projections
        }
        for name, own in heads.items():
            if all(styles[each] not in ("colwise", PACKED_QKV) for each in projections[name]):
                shard = HeadShard(query=own.own_query, key=own.own_key)
                self._sharding.heads[self._modules[name]] = shard
        return heads

    def _cut_vocabulary(self) -> set[str]:
        """Cuts embedding and head by vocabulary; returns their names."""
        embedding = self._model.get_input_embeddings()
        head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        method = self._methods.of_head(head)
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

    def _cut_linear(self, name: str, style: str, heads: Heads | None) -> None:
        module = self._modules[name]
        method = self._methods.of(module)
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

    def _output_shard(self, name: str, style: str, outputs: int, heads: Heads | None) -> Shard:
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

    def _cut_head_rows(self, name: str, heads: Heads | None) -> None:
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
