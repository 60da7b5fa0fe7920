"""Makes a model's bits for a row independent of the rows beside it, or refuses the model.

Linear layers have a product of their own for that, attention a backend; here is the rest.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from workers.errors import ModelError
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from workers.layers.paged_attention import HeadShard, ProbePass
from workers.layers.row_forwards import NormTiles, WholeVectors
from workers.layers.row_tiles import TILE_ROWS
from workers.models.probe import Forward

ELEMENTWISE = frozenset(each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())
LINEARS = (ColumnParallelLinear, RowParallelLinear)
OTHERWISE = "serve it without --deterministic"
# More than a tile, so that a row comes to another tile and another place in it.
NUM_ROWS = TILE_ROWS + 9
PLACES = (0, 1, 18, TILE_ROWS + 3, NUM_ROWS - 1)
# A prime number, so that threads, which share out numbers and not rows, begin within rows; enough
# of them for torch to use threads at all.
MANY_ROWS = 997
MOST_ENDS = 16


def make_invariant(model: PreTrainedModel, device: torch.device) -> None:
    """Of a model whose linear layers are so already, by their methods.

    Raises ModelError: a module multiplies matrices by itself.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_norm = "norm" in kind.lower()  # some have a row of weights for each head
        if not is_norm and not isinstance(module, (*LINEARS, nn.Embedding)):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    raise ModelError(
                        f"{type(model).__name__}: {kind} ({name}) multiplies by {own} itself, so "
                        "that its results depend on the batch: deterministic doesn't cover it "
                        f"(experts and their routers, convolutions); {OTHERWISE}"
                    )
        if device.type == "cpu" and type(module) in ELEMENTWISE:
            module.__dict__["forward"] = WholeVectors(module.forward)
        if device.type == "cuda" and is_norm:
            module.__dict__["forward"] = NormTiles(module.forward)


def check_rows(
    model: PreTrainedModel,
    forward: Forward,
    *,
    heads: Mapping[nn.Module, HeadShard],
    max_positions: int,
    vocab_size: int,
) -> None:
    """Runs some rows alone and among others, each as if it saw itself alone, and compares bits.

    Raises ModelError: they differ; it names the first module that they come from.
    """
    rows = torch.arange(NUM_ROWS)
    ids = (rows * vocab_size // NUM_ROWS).roll(7)
    positions = rows * max_positions // NUM_ROWS
    together, alone = _Outputs(model), {place: _Outputs(model) for place in PLACES}
    with together:
        wanted = torch.tensor(PLACES)
        logits = forward(ids, positions, wanted, ProbePass(max_positions, heads))
    wrong: list[str] = []
    for number, (place, outputs) in enumerate(alone.items()):
        here = slice(place, place + 1)
        probe = ProbePass(max_positions, heads)
        with outputs:
            own = forward(ids[here], positions[here], torch.tensor([0]), probe)
        wrong += outputs.differing(together, place)
        if not torch.equal(own[0], logits[number]):
            wrong.append("its logits")
    wrong += _differing_where_threads_begin(
        forward, heads=heads, max_positions=max_positions, vocab_size=vocab_size
    )
    # All ranks have run as often by now: none waits for one that raises.
    if wrong:
        raise ModelError(
            f"{type(model).__name__}: what {wrong[0]} gives for a token depends on the tokens "
            f"beside it: deterministic doesn't cover it; {OTHERWISE}"
        )


def _differing_where_threads_begin(
    forward: Forward,
    *,
    heads: Mapping[nn.Module, HeadShard],
    max_positions: int,
    vocab_size: int,
) -> Iterator[str]:
    """Names logits that are others alone than among many rows, at whose places threads begin."""
    rows = torch.arange(MANY_ROWS)
    ids, positions = rows % vocab_size, rows % max_positions
    shares = {count: range(1, count) for count in (2, torch.get_num_threads())}
    begins = {MANY_ROWS * part // count for count, parts in shares.items() for part in parts}
    places = torch.tensor([*sorted(begins)[:MOST_ENDS], MANY_ROWS - 1])
    among = forward(ids, positions, places, ProbePass(max_positions, heads))
    for place, logits in zip(places.tolist(), among, strict=True):
        here = slice(place, place + 1)
        probe = ProbePass(max_positions, heads)
        own = forward(ids[here], positions[here], torch.tensor([0]), probe)
        if not torch.equal(own[0], logits):
            yield f"a function of its own (token {place} of {MANY_ROWS})"


class _Outputs:
    """The outputs of all modules in one pass, in the order in which they came."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._names = {module: name for name, module in model.named_modules() if name}
        self._found: list[tuple[nn.Module, list[torch.Tensor]]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        self._hooks = [module.register_forward_hook(self._keep) for module in self._names]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, module: nn.Module, _: object, outputs: object) -> None:
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        self._found.append((module, [each for each in several if isinstance(each, torch.Tensor)]))

    def differing(self, together: "_Outputs", place: int) -> Iterator[str]:
        """Of one row's pass: the modules that gave it other bits at its place among others."""
        for (module, mine), (_, theirs) in zip(self._found, together._found, strict=True):
            for one, several in zip(mine, theirs, strict=True):
                # Others are sequences' or the model's: what no row has says nothing of rows.
                by_row = one.dim() > 1 and one.shape[:2] == (1, 1) and several.shape[1] == NUM_ROWS
                if by_row and not torch.equal(one[0, 0], several[0, place]):
                    yield f"{type(module).__name__} ({self._names[module]})"
