"""Lean layers that run one after another, as one call from Python."""

from collections.abc import Sequence

import torch

from workers.layers.lean import LeanLayer, PlacedLayer, Program, Turns, UnsuitedLayerError
from workers.layers.paged_attention import PagedAttention, PlannedCall


class LeanRun:
    """Layers of one room. The call is cut where Python has to do something in a layer.

    That is: attention by other backends, sums over ranks, modules that have no kernel.
    """

    def __init__(
        self,
        layers: Sequence[tuple[LeanLayer, int]],
        attention: PagedAttention,
    ) -> None:
        """With each layer comes which of the turns it gets."""
        self._layers = layers
        self._calls = [layer.call for layer, _ in layers]
        # Of layers that take the same, one is asked whether it does.
        self._first_of = {
            (which, layer.call.shape.k_dim, layer.parts.hidden_size): (layer, which)
            for layer, which in layers
        }
        self._attention = attention
        self._room = layers[0][0].room
        # For which there is a program: of the room, and the caches, None in a dry run.
        self._version = 0
        self._caches: Sequence[object] = []
        self._placed: list[PlacedLayer] = []
        self._program = Program().parts()

    def __call__(
        self,
        hidden: torch.Tensor,
        turns: Sequence[Turns],
        masks: Sequence[object] | None = None,
    ) -> torch.Tensor:
        """[1, T, hidden] -> [1, T, hidden], which is there until layers of the room run again.

        In a dry run `masks` has one for each layer.

        Raises UnsuitedLayerError: kernels would read beyond what they are given, or other numbers.
        """
        for layer, which in self._first_of.values():
            layer.check(hidden, turns[which])
        num_tokens = hidden.shape[1]
        self._room.prepare(num_tokens)
        taken = self._attention.take(self._calls, hidden.dtype)
        planned = [None for _ in self._calls] if taken is None else taken
        self._place(planned)
        dense = [(cosine.contiguous(), sine.contiguous()) for cosine, sine in turns]
        for place, (_, which) in enumerate(self._layers):
            mask = None if masks is None else masks[place]
            self._placed[place].tell(dense[which], planned[place], mask)
        rows = self._room.rows("hidden", num_tokens, 1, hidden.shape[2]).view_as(hidden)
        rows.copy_(hidden)
        for calls, then in self._program:
            calls(num_tokens)
            then(num_tokens)
        return rows

    def _place(self, planned: Sequence[PlannedCall | None]) -> None:
        """Writes all calls down, unless they are."""
        caches = [None if each is None else each.cache for each in planned]
        is_known = len(caches) == len(self._caches) and all(
            new is old for new, old in zip(caches, self._caches, strict=True)
        )
        if is_known and self._version == self._room.version:
            return
        program = Program()
        self._placed = [
            layer.place(program, call)
            for (layer, _), call in zip(self._layers, planned, strict=True)
        ]
        self._program = program.parts()
        self._version, self._caches = self._room.version, caches


class LeanForward:
    """Stands for the forward of one decoder layer."""

    def __init__(self, layer: LeanLayer, attention: PagedAttention) -> None:
        self.layer = layer
        self._run = LeanRun([(layer, 0)], attention)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: object = None,
        position_embeddings: object = None,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        """[1, T, hidden] -> [1, T, hidden].

        Raises UnsuitedLayerError, as LeanRun does.
        """
        match position_embeddings:
            case (torch.Tensor() as cosine, torch.Tensor() as sine):
                return self._run(hidden_states, [(cosine, sine)], [attention_mask]).clone()
        raise UnsuitedLayerError("no cosine and sine of all tokens")
