"""Which stored tensors make up each tensor of a model: checked as a whole before any is read."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from workers.errors import ModelError
from workers.loading.checkpoint import FLOATS, INTEGERS, StoredTensor, list_some
from workers.loading.conversion import Conversion, Converted, Source, WholeModel, plan
from workers.loading.members import are_numbered, explain
from workers.loading.unread import UnreadTensor
from workers.loading.weights import differ

logger = logging.getLogger(__name__)

# Frequencies that old checkpoints store and models compute themselves.
HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.masked_bias|embeddings\.position_ids)$")
# What a converter raises where the stored tensors don't fit it.
CONVERSION_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def match_names(
    model: PreTrainedModel,
    shapes: Mapping[str, torch.Size],
    stored: Mapping[str, StoredTensor],
    folder: Path,
    *,
    ignored: Collection[str] = (),
) -> dict[str, Source]:
    """Where each tensor of the model comes from, by its name in the model.

    `shapes` are those of the whole model, which is on the meta device and not cut yet. A tied
    tensor appears once. Stored tensors whose names in the model begin with one of `ignored` are
    left aside: they belong to parts that weren't built.

    Raises ModelError: a tensor is missing, unknown, of another shape, or of a format that isn't
    served.
    """
    names = _find_names(model, shapes, stored, tuple(ignored))
    files = {tensor.file for tensor in stored.values()}
    where = str(*files) if len(files) == 1 else f"the checkpoint in {folder}"
    sources = _collect_sources(names, shapes, where)
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    _join_tied(sources, ties)
    if missing := set(shapes) - set(ties) - set(sources):
        raise ModelError(f"{where} lacks {list_some(sorted(missing))}")
    _refuse_unknown(model, names.unknown)
    for name, source in sources.items():
        if isinstance(source, UnreadTensor) and source.shape != tuple(shapes[name]):
            tensor = source.pieces[0].stored
            raise ModelError(
                f"{tensor.file}: {tensor.name} has shape {list(source.shape)}, but config.json "
                f"makes it {list(shapes[name])}"
            )
    if converted := [name for name, source in sources.items() if isinstance(source, Converted)]:
        logger.info("converted as a whole on every rank: %s", list_some(converted))
    return sources


class TieError(ModelError):
    """Two tensors that the configuration makes one are stored, and differ."""


@dataclass(frozen=True, slots=True)
class _Names:
    """What the stored tensors are for the model."""

    plain: dict[str, StoredTensor] = field(default_factory=dict)  # by the model's name
    conversions: dict[str, Conversion] = field(default_factory=dict)  # by the first target's
    unknown: list[tuple[str, StoredTensor]] = field(default_factory=list)  # with the new name


def _find_names(
    model: PreTrainedModel,
    shapes: Mapping[str, torch.Size],
    stored: Mapping[str, StoredTensor],
    ignored: tuple[str, ...],
) -> _Names:
    """Renames as transformers does when it loads (convert_and_load_state_dict_in_model)."""
    mapping = get_model_conversion_mapping(model)
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    prefix, known, whole = model.base_model_prefix, dict(shapes), WholeModel(model)
    names = _Names()
    # The order in which converters number experts, and in which renamings see what they wait for.
    for key in sorted(stored, key=dot_natural_key):
        tensor = stored[key]
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name.startswith(ignored):
            continue
        if name not in known:
            names.unknown.append((name, tensor))
            continue
        _check_format(tensor, whole.tensors[name].dtype)
        if pattern is None:
            if name in names.plain:
                pair = f"{names.plain[name].name} and {tensor.name}"
                raise ModelError(f"{tensor.file}: {pair} are both {name}")
            names.plain[name] = tensor
            continue
        if name not in names.conversions:
            names.conversions[name] = Conversion(
                target=name, converter=by_pattern[pattern], members=[], model=whole
            )
        names.conversions[name].members.append((pattern, tensor))
    return names


def _collect_sources(
    names: _Names, shapes: Mapping[str, torch.Size], where: str
) -> dict[str, Source]:
    """Raises ModelError: a conversion gives what the model doesn't need, or one comes twice."""
    sources: dict[str, Source] = {}
    for conversion in names.conversions.values():
        first = conversion.members[0][1]
        for name, source in _check_conversion(conversion, shapes, where).items():
            if name in sources:
                raise ModelError(f"{first.file}: {first.name} and other tensors are both {name}")
            sources[name] = source
    for name, tensor in names.plain.items():
        if name in sources:
            raise ModelError(f"{tensor.file}: {tensor.name} and other tensors are both {name}")
        sources[name] = UnreadTensor.whole(tensor)
    return sources


def _check_format(tensor: StoredTensor, dtype: torch.dtype) -> None:
    """Raises ModelError: it can't be converted to the model's dtype."""
    formats = FLOATS if dtype.is_floating_point else INTEGERS
    if tensor.format not in formats:
        raise ModelError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.format}, must be one of "
            f"{', '.join(formats)}: quantised checkpoints aren't served"
        )


def _check_conversion(
    conversion: Conversion, shapes: Mapping[str, torch.Size], where: str
) -> dict[str, Source]:
    """What a group of stored tensors makes. Raises ModelError: not what the model needs."""
    try:
        sources = plan(conversion)
    except CONVERSION_ERRORS as error:
        expected = tuple(shapes[conversion.target])
        raise ModelError(explain(conversion, where, conversion.target, expected)) from error
    for name, source in sources.items():
        if name not in shapes:
            first = conversion.members[0][1]
            raise ModelError(f"{first.file}: {first.name} would become {name}, which isn't built")
        expected = tuple(shapes[name])
        if source.shape != expected or not are_numbered(conversion):
            raise ModelError(explain(conversion, where, name, expected, made=source.shape))
    return sources


def _join_tied(sources: dict[str, Source], ties: Mapping[str, str]) -> None:
    """Leaves one of each two tied tensors. Raises TieError: both are stored, and differ."""
    for target, kept in ties.items():
        alias = sources.pop(target, None)
        if alias is None or alias is sources.setdefault(kept, alias):
            continue
        other = sources[kept]
        if not (isinstance(alias, UnreadTensor) and isinstance(other, UnreadTensor)):
            raise ModelError(
                f"config.json makes {target} and {kept} one, but both are stored, in forms that "
                "can't be compared: set its tie_word_embeddings to false"
            )
        if differ(alias, other):
            mine, theirs = alias.pieces[0].stored, other.pieces[0].stored
            raise TieError(
                f"{mine.file}: {mine.name} differs from {theirs.name}, but config.json makes them "
                "one: set its tie_word_embeddings to false"
            )


def _refuse_unknown(model: PreTrainedModel, unknown: Sequence[tuple[str, StoredTensor]]) -> None:
    patterns = [HARMLESS, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    listed = [
        f"{tensor.name} ({tensor.file.name})"
        for name, tensor in unknown
        if not any(pattern.search(name) for pattern in patterns)
    ]
    if listed:
        folder, kind = unknown[0][1].file.parent, type(model).__name__
        raise ModelError(
            f"the checkpoint in {folder} has tensors that {kind} doesn't know: {list_some(listed)}"
        )
