"""What the ranks have loaded, as the driver sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos import worker_pb2
from runtime.errors import WorkerError
from runtime.scheduling.cache_layout import LayerCacheSpec

# In these the ranks must agree; memory and parameters may differ between them.
SHARED_FIELDS = (
    "architecture",
    "vocab_size",
    "max_model_len",
    "eos_token_ids",
    "block_size_multiple",
    "attention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One model, sharded over all ranks of a group."""

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerCacheSpec, ...]  # one per attention call of a forward pass, on one rank
    available_memory_bytes: int  # for the cache, on the rank that has least
    block_size_multiple: int
    parameter_bytes: int  # of all ranks together
    attention: str


def loaded_model(specs: Sequence[worker_pb2.ModelSpec]) -> LoadedModel:
    """From the specs of all ranks, in their order.

    Raises WorkerError: two ranks differ; the message names them, the field and both values.
    """
    first = specs[0]
    for rank, spec in enumerate(specs):
        _check_agreement(first, rank, spec)
    return LoadedModel(
        architecture=first.architecture,
        vocab_size=first.vocab_size,
        max_model_len=first.max_model_len,
        eos_token_ids=tuple(first.eos_token_ids),
        layers=tuple(map(_layer, first.layers)),
        available_memory_bytes=min(spec.available_memory_bytes for spec in specs),
        block_size_multiple=first.block_size_multiple,
        parameter_bytes=sum(spec.parameter_bytes for spec in specs),
        attention=first.attention,
    )


def _check_agreement(first: worker_pb2.ModelSpec, rank: int, spec: worker_pb2.ModelSpec) -> None:
    for name in SHARED_FIELDS:
        one, other = getattr(first, name), getattr(spec, name)
        if one != other:
            raise WorkerError(
                f"ranks 0 and {rank} loaded different models: {name} is {one} and {other}"
            )
    ours, theirs = tuple(map(_layer, first.layers)), tuple(map(_layer, spec.layers))
    if len(ours) != len(theirs):
        raise WorkerError(
            f"ranks 0 and {rank} loaded different models: {len(ours)} and {len(theirs)} layers"
        )
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            raise WorkerError(
                f"ranks 0 and {rank} loaded different models: layer {index} is {one} and {other}"
            )


def _layer(layer: worker_pb2.LayerCacheSpec) -> LayerCacheSpec:
    return LayerCacheSpec(
        window=layer.window,
        chunk=layer.chunk,
        num_kv_heads=layer.num_kv_heads,
        k_dim=layer.k_dim,
        v_dim=layer.v_dim,
        element_bytes=layer.element_bytes,
    )
