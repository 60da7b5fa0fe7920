"""What follows from the tokens that a row already has: penalties and bad words."""

from dataclasses import dataclass

import torch

from workers.batch import BadWords, SamplingColumns, TokenHistory
from workers.staging import upload, upload_together

COUNTED_ELEMENTS = 1 << 22  # of the table in which tokens are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalised:
    """The tokens of H rows with penalties, N in all, end to end. CPU tensors."""

    rows: torch.Tensor  # [N] int64, of R, rising
    token_ids: torch.Tensor  # [N] int64, a token as often as it occurs
    outputs: torch.Tensor  # [N] float32, 1 where the token is no part of the prompt
    places: torch.Tensor  # [N] int64, index of the row in H
    ends: list[int]  # [H], index into N


def find_penalised(history: TokenHistory, columns: SamplingColumns) -> Penalised:
    """Of the rows in `history`, those with a penalty that changes something."""
    rows = history.rows
    concerned = (
        (columns.repetition_penalty != 1)
        | (columns.frequency_penalty != 0)
        | (columns.presence_penalty != 0)
    )[rows]
    of_token = torch.repeat_interleave(history.lengths)
    starts = history.lengths.cumsum(0) - history.lengths
    offset = torch.arange(len(of_token)) - starts[of_token]
    outputs = (offset >= history.num_prompt_tokens[of_token]).float()
    token_ids, lengths = history.token_ids, history.lengths
    if not bool(concerned.all()):
        kept = concerned[of_token]
        of_token, token_ids, outputs = of_token[kept], token_ids[kept], outputs[kept]
        lengths = lengths[concerned]
    return Penalised(
        rows=rows[of_token],
        token_ids=token_ids,
        outputs=outputs,
        places=torch.repeat_interleave(lengths),
        ends=lengths.cumsum(0).tolist(),
    )


class Penalties:
    """Repetition penalty over prompt and output, frequency and presence penalties over output."""

    def __init__(self) -> None:
        self._table: torch.Tensor | None = None  # float32, all 0 between uses

    def apply(self, logits: torch.Tensor, tokens: Penalised, columns: SamplingColumns) -> None:
        """Changes logits [R, V] in place."""
        device = logits.device
        rows, token_ids = upload_together((tokens.rows, tokens.token_ids), device)
        counts = self._count(tokens, token_ids, logits.shape[1])
        factor, frequency, presence = upload_together(
            (
                columns.repetition_penalty[tokens.rows],
                columns.frequency_penalty[tokens.rows],
                columns.presence_penalty[tokens.rows],
            ),
            device,
        )
        # A token that occurs twice is written twice, with the same value.
        values = logits[rows, token_ids]
        values = torch.where(values > 0, values / factor, values * factor)
        values -= frequency * counts
        values -= presence * (counts > 0)
        # The best of a row must be finite, whatever the factor.
        logits[rows, token_ids] = values.clamp_(max=torch.finfo(values.dtype).max)

    def _count(self, tokens: Penalised, token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """How often each of the tokens [N] is among its row's outputs; [N] float32."""
        device = token_ids.device
        step = max(1, COUNTED_ELEMENTS // vocab_size)
        size = min(step, len(tokens.ends)) * vocab_size
        table = self._table
        if table is None or len(table) < size or table.device != device:
            table = self._table = torch.zeros(size, device=device)
        keys = upload(tokens.places % step, device) * vocab_size + token_ids
        outputs = upload(tokens.outputs, device)
        counts = torch.empty_like(outputs)
        start = 0
        for last in range(step - 1, len(tokens.ends) + step - 1, step):
            end = tokens.ends[min(last, len(tokens.ends) - 1)]
            here = keys[start:end]
            table.scatter_add_(0, here, outputs[start:end])
            counts[start:end] = table[here]
            table[here] = 0
            start = end
        return counts


def completed_bad_words(
    words: BadWords, history: TokenHistory, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and last tokens of the words whose other tokens end the row's history; [n] each."""
    if len(words.rows) == 0:
        return words.rows, words.rows
    # Rows without history have none of 0 tokens.
    lengths = torch.zeros(num_rows, dtype=torch.int64).index_copy_(0, history.rows, history.lengths)
    ends = torch.zeros_like(lengths).index_copy_(0, history.rows, history.lengths.cumsum(0))
    of_token = torch.repeat_interleave(words.lengths)
    word_ends = words.lengths.cumsum(0)
    to_last = word_ends[of_token] - 1 - torch.arange(len(of_token))  # tokens from it to the last
    before = to_last > 0
    row = words.rows[of_token]
    there = before & (to_last <= lengths[row])
    seen = torch.full_like(of_token, -1)
    seen[there] = history.token_ids[(ends[row] - to_last)[there]]
    differs = (before & (seen != words.token_ids)).long()
    num_different = torch.zeros_like(words.rows).index_add_(0, of_token, differs)
    completed = num_different == 0
    return words.rows[completed], words.token_ids[word_ends[completed] - 1]
