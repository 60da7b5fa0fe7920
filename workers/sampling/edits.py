"""Changes of single logits: biases, penalties, forbidden tokens.

Few of a row's tokens are concerned, so they are changed in place and put back after sampling.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.batch import SamplerInputs, SamplingColumns, TokenMasks
from workers.sampling.history import Penalties, completed_bad_words, find_penalised
from workers.sampling.masks import forbidden_pairs
from workers.sampling.segments import NEVER
from workers.staging import upload, upload_together

Pairs = tuple[torch.Tensor, torch.Tensor]  # rows and token ids, [n] int64 each


class Editor:
    """Applies what a step's rows ask for, as far as it concerns single tokens."""

    def __init__(self, eos_token_ids: torch.Tensor) -> None:
        """`eos_token_ids` [E] int64 end a sequence."""
        self._eos_token_ids = eos_token_ids
        self._penalties = Penalties()

    @contextmanager
    def edited(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        columns: SamplingColumns,
        inputs: SamplerInputs,
        masks: TokenMasks,
    ) -> Iterator[bool]:
        """In the block logits [R, V] are as the parameters want them; yields whether any changed.

        Dense masks aren't applied.
        """
        device = logits.device
        biases = inputs.biases
        if self.leaves(positions, columns, inputs, masks):
            yield False
            return
        penalised = find_penalised(inputs.history, columns)
        forbidden = _joined(
            forbidden_pairs(inputs.masks),
            forbidden_pairs(masks),
            self._early_ends(positions, columns),
            completed_bad_words(inputs.bad_words, inputs.history, len(positions)),
        )
        touched = _joined(
            (biases.rows, biases.token_ids), (penalised.rows, penalised.token_ids), forbidden
        )
        if len(touched[0]) == 0:
            yield False
            return
        forbidden, touched = _upload(forbidden, device), _upload(touched, device)
        before = logits[touched]
        try:
            if len(biases.rows):
                biased = _upload((biases.rows, biases.token_ids), device)
                logits[biased] = logits[biased] + upload(biases.values, device)
            if len(penalised.rows):
                self._penalties.apply(logits, penalised, columns)
            logits[forbidden] = NEVER
            yield True
        finally:
            logits[touched] = before

    def leaves(
        self,
        positions: torch.Tensor,
        columns: SamplingColumns,
        inputs: SamplerInputs,
        masks: TokenMasks,
    ) -> bool:
        """Whether it is plain that nothing is asked for."""
        given = (inputs.biases, inputs.history, inputs.bad_words, inputs.masks, masks)
        return not any(each.rows.numel() for each in given) and bool(
            (positions >= columns.min_length).all()
        )

    def _early_ends(self, positions: torch.Tensor, columns: SamplingColumns) -> Pairs:
        rows = (positions < columns.min_length).nonzero().flatten()
        ends = self._eos_token_ids
        return rows.repeat_interleave(len(ends)), ends.repeat(len(rows))


def _joined(*pairs: Pairs) -> Pairs:
    rows, ids = zip(*pairs, strict=True)
    return torch.cat(rows), torch.cat(ids)


def _upload(pairs: Pairs, device: torch.device) -> Pairs:
    rows, ids = upload_together(pairs, device)
    return rows, ids
