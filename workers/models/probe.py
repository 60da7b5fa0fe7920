"""What a loaded model does outside attention, found by dry runs of six tokens.

Paged attention is all that joins the tokens of a sequence, and all that keeps those of others
apart. A model that joins tokens elsewhere, or counts positions by itself, would give wrong tokens
without a word: it is refused here.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.errors import ModelError
from workers.layers.mask_rule import MaskRule
from workers.layers.paged_attention import AttentionCall, AttentionPass, HeadShard, ProbePass
from workers.models.config import TRANSFORMERS_ERRORS

# Input ids [T], positions [T], rows of T that get logits [R], attention -> logits [R, V].
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPass], torch.Tensor]

# Both passes have as many tokens, so that arithmetic differs in a few last bits at most; a token
# that sees a neighbour or another position differs by its own size.
BOUND = 0.03


def find_attention_calls(
    model: PreTrainedModel,
    forward: Forward,
    *,
    heads: Mapping[nn.Module, HeadShard],
    max_positions: int,
    vocab_size: int,
    tp: int,
) -> tuple[AttentionCall, ...]:
    """The attention calls of a forward pass, in order.

    Raises ModelError: the model asks of attention what isn't built, or a token's queries, keys,
    values or logits depend on more than the token, its position and attention.
    """
    kind = type(model).__name__
    pairs = _pairs(vocab_size, max_positions)
    passes = []
    try:
        for first, second in zip(pairs, (*pairs[1:], pairs[0]), strict=True):
            probe = ProbePass(max_positions, heads)
            ids, positions = torch.cat((first, second), dim=1)
            logits = forward(ids, positions, torch.tensor([1, 3]), probe)
            passes.append((probe, logits))
    except TRANSFORMERS_ERRORS as error:
        if MaskRule.__name__ in str(error):
            raise ModelError(
                f"{kind} computes with the attention mask by itself (ALiBi, learned or sparse "
                "masks, attention code of its own): such models aren't served"
            ) from error
        if tp > 1:
            raise ModelError(
                f"{kind}: its parts don't fit together at tp={tp} ({error}): serve it with --tp 1"
            ) from error
        raise ModelError(f"{kind} doesn't run on paged attention: {error}") from error
    calls = passes[0][0].calls
    _check_calls(model, calls, tp)
    for place, (probe, logits) in enumerate(passes):
        if probe.calls != calls:
            raise ModelError(f"{kind} calls attention differently in every forward pass")
        if len(logits) != 2:
            raise ModelError(f"{kind} doesn't let the rows be chosen that get logits")
        # The pass before this one ended with the pair that this one begins with.
        before, logits_before = passes[place - 1]
        ended = [*_rows(before, slice(2, 4)), logits_before[1]]
        begun = [*_rows(probe, slice(0, 2)), logits[0]]
        if not all(bool(tensor.isfinite().all()) for tensor in (*ended, *begun)):
            raise ModelError(
                f"{kind} computes numbers that aren't finite in {model.dtype}: its weights are "
                "damaged, or need another dtype"
            )
        if not all(map(_alike, ended, begun)):
            layers = getattr(model.config.get_text_config(), "num_hidden_layers", "its")
            raise ModelError(
                f"{kind} lets tokens depend on others outside attention, or counts their "
                f"positions by itself (it calls attention {len(calls)} times for {layers} "
                "layers): recurrent and convolution layers, and attention code of their own, "
                "aren't served"
            )
    return tuple(calls)


def _pairs(vocab_size: int, max_positions: int) -> list[torch.Tensor]:
    """Three pairs of tokens, each [2, 2]: ids, and positions in the beginning, middle and end."""
    ids = torch.arange(1, 7) * vocab_size // 7
    starts = (0, max(max_positions // 2 - 1, 0), max(max_positions - 2, 0))
    return [
        torch.stack((ids[2 * place : 2 * place + 2], torch.tensor([start, start + 1])))
        for place, start in enumerate(starts)
    ]


def _check_calls(model: PreTrainedModel, calls: Sequence[AttentionCall], tp: int) -> None:
    kind = type(model).__name__
    if not calls:
        raise ModelError(
            f"{kind} never calls attention: recurrent layers and attention code of their own "
            "aren't served"
        )
    for shape in (call.shape for call in calls):
        if shape.num_heads % shape.num_kv_heads:
            raise ModelError(
                f"{kind}: {shape.num_heads} query heads can't share {shape.num_kv_heads} KV heads "
                f"on each of {tp} ranks: use another tp"
            )


def _rows(probe: ProbePass, rows: slice) -> list[torch.Tensor]:
    """Queries, keys and values of some of a pass's tokens."""
    return [
        tensor[:, rows] for call in probe.inputs for tensor in (call.query, call.key, call.value)
    ]


def _alike(mine: torch.Tensor, other: torch.Tensor) -> bool:
    mine, other = mine.double(), other.double()
    return bool((mine - other).norm() <= BOUND * mine.norm())
