"""Where lean layers keep what they compute on the way."""

from collections.abc import Mapping

import torch

from workers.native.linear import empty_aligned


class LeanRoom:
    """Buffers of some numbers a row, one after another used by all layers of a model.

    What is in one lasts until the next layer begins.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.version = 0  # of the addresses, and of the number of threads
        self._dtype = dtype
        self._widths: dict[str, int] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._capacity = 0
        self._num_threads = 0
        self._views: dict[tuple[str, int, int], torch.Tensor] = {}

    def reserve(self, widths: Mapping[str, int]) -> None:
        """Each buffer is as wide as the widest that is asked for. Before the first layer runs."""
        for name, width in widths.items():
            self._widths[name] = max(width, self._widths.get(name, 0))

    def prepare(self, num_rows: int) -> None:
        """For so many rows, computed by torch's number of threads."""
        num_threads = torch.get_num_threads()
        if num_rows <= self._capacity and num_threads == self._num_threads:
            return
        if num_rows > self._capacity:
            self._capacity = 1 << (num_rows - 1).bit_length()
            self._views.clear()
            self._buffers = {
                name: empty_aligned((self._capacity * width,), self._dtype)
                for name, width in self._widths.items()
            }
        self._num_threads = num_threads
        self.version += 1

    def address(self, name: str) -> int:
        return self._buffers[name].data_ptr()

    def rows(self, name: str, num_rows: int, num_heads: int, dim: int) -> torch.Tensor:
        """What a kernel writes there as num_rows, dense: [num_rows, num_heads, dim]."""
        key = name, num_heads, dim
        view = self._views.get(key)
        if view is None or len(view) != num_rows:
            count = num_rows * num_heads * dim
            view = self._buffers[name][:count].view(num_rows, num_heads, dim)
            self._views[key] = view
        return view
