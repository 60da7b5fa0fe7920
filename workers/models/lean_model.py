"""Runs a model whose decoder layers are all lean without the code around them.

That code makes masks, caches and records that a step has no use for: on a CPU half as much as all
layers of a step of one row. What a model does besides calling its modules one after another would
be left out, so logits must equal those of its own code in every bit.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.layers.lean import LeanLayer, Turns
from workers.layers.lean_run import LeanForward, LeanRun
from workers.layers.paged_attention import HeadShard, PagedAttention, ProbePass
from workers.models.lean_layers import draw_tokens, find_norm
from workers.models.probe import Forward
from workers.native.calls import Calls
from workers.native.decoder import DecoderKernels, Norm, decoder_kernels
from workers.parallel import TensorParallel

logger = logging.getLogger(__name__)

# They stand for what a step brings.
HIDDEN, POSITIONS, UNKNOWN = object(), object(), object()


@dataclass(frozen=True, slots=True)
class _Event:
    """What a module was called with in a dry run, and returned."""

    module: nn.Module
    positional: tuple[object, ...]
    named: Mapping[str, object]
    output: object


@dataclass(frozen=True, slots=True)
class _Turns:
    """A call of a rotary embedding; its inputs are constants but for what stands for the step's."""

    module: nn.Module
    positional: Sequence[object]
    named: Mapping[str, object]

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor) -> Turns:
        known = {HIDDEN: hidden, POSITIONS: positions}
        turns: Turns = self.module(
            *(known.get(each, each) for each in self.positional),
            **{name: known.get(each, each) for name, each in self.named.items()},
        )
        return turns


@dataclass(frozen=True, slots=True)
class LeanModel:
    """What a model calls, in its order."""

    embedding: nn.Module
    turns: Sequence[_Turns]
    layers: LeanRun
    norm: nn.Module
    head: nn.Module
    kernels: DecoderKernels
    known_norm: Norm | None = None  # of `norm`

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        masks: Sequence[object] | None = None,
    ) -> torch.Tensor:
        """[1, T], [1, T], n rows of T -> this rank's logits [n, vocabulary part].

        `masks` are what layers get in a dry run.
        """
        hidden = self.embedding(ids)
        turns = [each(hidden, positions) for each in self.turns]
        hidden = self.layers(hidden, turns, masks)
        logits: torch.Tensor = self.head(self._normed(hidden, wanted))[0]
        return logits

    def _normed(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """[1, T, hidden], n rows of T -> [1, n, hidden]."""
        norm = self.known_norm
        if norm is None:
            normed: torch.Tensor = self.norm(hidden)[:, wanted]
            return normed
        rows = hidden[:, wanted]
        made = torch.empty_like(rows)
        addresses = made.data_ptr(), rows.data_ptr()
        Calls([self.kernels.norm(*addresses, norm, width=rows.shape[-1])])(rows.shape[1])
        return made


def find_lean_model(
    model: PreTrainedModel,
    forward: Forward,
    attention: PagedAttention,
    *,
    heads: Mapping[nn.Module, HeadShard],
    max_positions: int,
    vocab_size: int,
    parallel: TensorParallel,
) -> LeanModel | None:
    """In inference mode, on all ranks together.

    None: on some rank a layer isn't lean, or logits differ from those of the model's own code.
    """
    kernels = decoder_kernels(model.dtype)
    if not parallel.all_agree(kernels is not None) or kernels is None:
        return None
    ids, positions = draw_tokens(max_positions, vocab_size)
    events, expected = _record(model, forward, ids, positions, ProbePass(max_positions, heads))
    inputs = ids.unsqueeze(0), positions.unsqueeze(0)
    found = _put_together(model, events, *inputs, attention, kernels)
    if not parallel.all_agree(found is not None) or found is None:
        return None
    masks = [each.named.get("attention_mask") for each in events if _lean(each.module)]
    with attention.running(ProbePass(max_positions, heads), inputs[1]):
        logits = found(*inputs, torch.arange(len(ids)), masks)
    if not parallel.all_agree(logits.equal(expected)):
        logger.info("the code around decoder layers is transformers': it does more than call them")
        return None
    return replace(found, known_norm=find_norm(found.norm, model.dtype))


def _record(
    model: PreTrainedModel,
    forward: Forward,
    ids: torch.Tensor,
    positions: torch.Tensor,
    probe: ProbePass,
) -> tuple[list[_Event], torch.Tensor]:
    """All calls of modules, in the order in which they ended, and the logits of all rows."""
    events: list[_Event] = []

    def note(module: nn.Module, positional: Any, named: Any, output: object) -> None:
        events.append(_Event(module, positional, named, output))

    hooks = [each.register_forward_hook(note, with_kwargs=True) for each in model.modules()]
    try:
        return events, forward(ids, positions, torch.arange(len(ids)), probe)
    finally:
        for hook in hooks:
            hook.remove()


def _lean(module: nn.Module) -> LeanLayer | None:
    """None: it isn't one."""
    forward = module.__dict__.get("forward")
    return forward.layer if isinstance(forward, LeanForward) else None


def _put_together(
    model: PreTrainedModel,
    events: Sequence[_Event],
    ids: torch.Tensor,
    positions: torch.Tensor,
    attention: PagedAttention,
    kernels: DecoderKernels,
) -> LeanModel | None:
    """None where lean layers don't follow each other from an embedding to a norm and the head."""
    found = [(each, lean) for each in events if (lean := _lean(each.module))]
    layers = [each for each, _ in found]
    if not layers or any(len(each.positional) != 1 for each in layers):
        return None
    first, last = layers[0].positional[0], layers[-1].output
    follow = all(after.positional[0] is before.output for before, after in pairwise(layers))
    embedding = _only(
        each for each in events if each.output is first and _are(each.positional, ids)
    )
    norm = _only(
        each for each in events if len(each.positional) == 1 and each.positional[0] is last
    )
    last_module: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head = _only(each for each in events if each.module is last_module)
    if not follow or embedding is None or norm is None or head is None:
        return None
    turns: list[_Turns] = []
    which: dict[int, int] = {}  # of `turns`, by the id of what a rotary embedding returned
    for given in [each.named.get("position_embeddings") for each in layers]:
        if id(given) in which:
            continue
        made = _only(each for each in events if each.output is given)
        call = None if made is None else _abstract(made, first, positions)
        if call is None:
            return None
        which[id(given)] = len(turns)
        turns.append(call)
    return LeanModel(
        embedding=embedding.module,
        turns=turns,
        layers=LeanRun(
            [(lean, which[id(each.named["position_embeddings"])]) for each, lean in found],
            attention,
        ),
        norm=norm.module,
        head=head.module,
        kernels=kernels,
    )


def _only(events: Iterable[_Event]) -> _Event | None:
    """None: there are none, or several."""
    found = [*islice(events, 2)]
    return found[0] if len(found) == 1 else None


def _are(inputs: tuple[object, ...], ids: torch.Tensor) -> bool:
    match inputs:
        case (torch.Tensor() as given,):
            return given.equal(ids)
    return False


def _abstract(event: _Event, hidden: object, positions: torch.Tensor) -> _Turns | None:
    """None: something it was called with isn't known."""

    def stand_in(given: object) -> object:
        if given is hidden:
            return HIDDEN
        if isinstance(given, torch.Tensor):
            return POSITIONS if given.equal(positions) else UNKNOWN
        return given if isinstance(given, str | int | float | None) else UNKNOWN

    positional = [stand_in(each) for each in event.positional]
    named = {name: stand_in(each) for name, each in event.named.items()}
    if UNKNOWN in positional or UNKNOWN in named.values():
        return None
    return _Turns(event.module, positional, named)
