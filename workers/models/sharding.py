"""Cuts a model without weights into one rank's part, by the plan in its class and configuration."""

import re

from torch import nn
from transformers import PreTrainedModel

from workers.errors import ModelError
from workers.layers.embedding import shard_embedding
from workers.layers.linear import ColumnParallelLinear, PlainWeights, RowParallelLinear
from workers.parallel import Shard, TensorParallel

WHOLE = frozenset({"replicated_with_grad_allreduce"})
# Projections whose outputs lie head after head, so that contiguous parts are whole heads.
QUERY_PROJECTIONS = frozenset({"q_proj", "query_key_value"})
KV_PROJECTIONS = frozenset({"k_proj", "v_proj"})


def shard_model(model: PreTrainedModel, parallel: TensorParallel) -> dict[str, Shard]:
    """Replaces what is cut; returns the part of each checkpoint tensor that this rank reads.

    A parameter without an entry is whole on every rank. Raises ModelError: the model can't be
    cut over so many ranks.
    """
    if parallel.size == 1:
        return {}
    kind = type(model).__name__
    if not model.tp_plan:
        raise ModelError(f"{kind} has no tensor-parallel plan: serve it with --tp 1")
    check_heads(num_heads(model), parallel.size)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelError(
            f"{kind}: {type(embedding).__name__} and {type(head).__name__} can't be cut by "
            "vocabulary: serve it with --tp 1"
        )
    _check_styles(model, {_name_of(model, embedding), _name_of(model, head)})
    shards: dict[str, Shard] = {}
    for name, module in list(model.named_modules()):
        if module is embedding:
            shard = parallel.padded_shard(0, embedding.num_embeddings)
            shard_embedding(embedding, shard, parallel)
            shards[f"{name}.weight"] = shard
            continue
        replacement = _cut(model, name, module, module is head, parallel)
        if replacement is not None:
            model.set_submodule(name, replacement)
            shards |= {f"{name}.{key}": shard for key, shard in replacement.shards.items()}
    return shards


def num_heads(model: PreTrainedModel) -> int:
    """Query heads of the whole model."""
    heads: int = model.config.get_text_config().num_attention_heads
    return heads


def check_heads(heads: int, tp: int) -> None:
    if heads % tp:
        raise ModelError(
            f"{heads} attention heads can't be split over tp={tp} ranks: use a tp that "
            f"divides {heads}"
        )


def _check_styles(model: PreTrainedModel, vocabulary: set[str]) -> None:
    """Refuses a plan of which a part that this model has isn't built."""
    modules = dict(model.named_modules())
    for name in (*modules, *dict(model.named_parameters())):
        style = model.tp_plan.get(_generic_name(name))
        if style is None or name in vocabulary or style in WHOLE:
            continue
        if style not in ("colwise", "rowwise") or not isinstance(modules.get(name), nn.Linear):
            raise ModelError(
                f"{type(model).__name__}: its tensor-parallel plan cuts {name} by style "
                f"{style!r}, which isn't built: serve it with --tp 1"
            )


def _cut(
    model: PreTrainedModel, name: str, module: nn.Module, is_head: bool, parallel: TensorParallel
) -> ColumnParallelLinear | RowParallelLinear | None:
    if not isinstance(module, nn.Linear):
        return None
    method = PlainWeights()
    if is_head:
        return ColumnParallelLinear(module, parallel.padded_shard(0, module.out_features), method)
    style = model.tp_plan.get(_generic_name(name))
    if style == "colwise":
        return ColumnParallelLinear(module, _column_shard(model, name, module, parallel), method)
    if style == "rowwise":
        _check_divides(name, "inputs", module.in_features, parallel.size)
        shard = parallel.even_shard(1, module.in_features)
        return RowParallelLinear(module, shard, method, parallel)
    return None


def _column_shard(
    model: PreTrainedModel, name: str, module: nn.Linear, parallel: TensorParallel
) -> Shard:
    parent, _, own = name.rpartition(".")
    if own in KV_PROJECTIONS:
        return _kv_shard(model, name, module, parallel)
    if own not in QUERY_PROJECTIONS and "att" in parent.rpartition(".")[2]:
        raise ModelError(
            f"{type(model).__name__}: cutting {name} by heads isn't built: serve it with --tp 1"
        )
    _check_divides(name, "outputs", module.out_features, parallel.size)
    return parallel.even_shard(0, module.out_features)


def _kv_shard(
    model: PreTrainedModel, name: str, module: nn.Linear, parallel: TensorParallel
) -> Shard:
    """Whole KV heads; one that several ranks hold where there are fewer heads than ranks."""
    attention = model.get_submodule(name.rpartition(".")[0])
    config = model.config.get_text_config()
    head_dim = getattr(attention, "head_dim", None) or config.hidden_size // num_heads(model)
    kv_heads = module.out_features // head_dim
    if kv_heads % parallel.size == 0:
        return parallel.even_shard(0, module.out_features)
    if parallel.size % kv_heads:
        raise ModelError(
            f"{kv_heads} KV heads can't be split over tp={parallel.size} ranks: use a tp that "
            f"divides {kv_heads} or is a multiple of it"
        )
    head = parallel.rank * kv_heads // parallel.size
    return Shard(dim=0, ranges=((head * head_dim, (head + 1) * head_dim),), size=head_dim)


def _check_divides(name: str, what: str, size: int, tp: int) -> None:
    if size % tp:
        raise ModelError(
            f"{name}: {size} {what} can't be split over tp={tp} ranks: use a tp that divides {size}"
        )


def _name_of(model: PreTrainedModel, wanted: nn.Module) -> str:
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[wanted]


def _generic_name(name: str) -> str:
    """A module's name as plans write it, layer numbers as stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
