"""Rows over a vocabulary, cut into segments of ids.

What holds for a segment's largest value spares most of its tokens a second look. Large temporaries
cost more than what is computed in them, so passes go in pieces; sums are over one segment, then
over the segments of a row: no result depends on the pieces or on the other rows.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

SEGMENT = 512  # ids of a segment
NEVER = float("-inf")  # the logit of a token that can't be drawn
# Of the elements of a piece: on a CPU it should stay in the cache, a GPU wants few large kernels.
CPU_PIECE = 1 << 19
GPU_PIECE = 1 << 26


class SegmentedRows:
    """Rows [R, V] float32 and the largest value of each of their S segments.

    A view of the rows that doesn't notice when they change.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.vocab_size = values.shape[1]
        num_full = self.vocab_size // SEGMENT
        body = values[:, : num_full * SEGMENT]
        self._body = body.view(len(values), num_full, SEGMENT)  # [R, full segments, SEGMENT]
        self._tail: torch.Tensor | None = None  # [R, SEGMENT], the last segment where it isn't full
        maxima = self._body.amax(dim=-1)
        if self.vocab_size % SEGMENT:
            last = values[:, num_full * SEGMENT :]
            self._tail = functional.pad(last, (0, -self.vocab_size % SEGMENT), value=NEVER)
            maxima = torch.cat((maxima, last.amax(dim=-1, keepdim=True)), dim=1)
        self.maxima = maxima  # [R, S]
        self.best = maxima.amax(dim=-1)  # [R], NaN where any value of the row is

    @property
    def is_on_host(self) -> bool:
        """There it's cheap to look before computing; from a device it would have to be read."""
        return self.values.device.type == "cpu"

    @property
    def num_full_segments(self) -> int:
        number: int = self._body.shape[1]
        return number

    def take_full(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """All full segments of rows [n], copied to `out` [n, full segments, SEGMENT]."""
        taken: torch.Tensor = torch.index_select(self._body, 0, rows, out=out)
        return taken

    def take_tail(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The last segment of rows [n], [n, SEGMENT] padded with -inf; None where it is full."""
        return None if self._tail is None else self._tail[rows]

    def take(self, rows: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Segments of rows [n], [n] -> values [n, SEGMENT], padded with -inf: a copy."""
        num_full = self.num_full_segments
        if num_full == 0:
            assert self._tail is not None, "a vocabulary has tokens"
            taken: torch.Tensor = self._tail[rows]
            return taken
        taken = self._body[rows, segments.clamp(max=num_full - 1)]
        if self._tail is None:
            return taken
        at_tail = segments == num_full
        if self.is_on_host:
            places = at_tail.nonzero().flatten()
            taken[places] = self._tail[rows[places]]
            return taken
        return torch.where(at_tail[:, None], self._tail[rows], taken)


def pieces(count: int, size: int, device: torch.device) -> Iterator[slice]:
    """Slices of `count` things of `size` elements each, as many at a time as should be."""
    elements = CPU_PIECE if device.type == "cpu" else GPU_PIECE
    step = max(1, elements // max(1, size))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))
