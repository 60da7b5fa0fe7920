"""What start-up tells the person who waits for it."""

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm


class StartupProgress:
    """Messages and bars of loaded weights and captured graphs on stderr; nothing if `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: tqdm | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def message(self, text: str) -> None:
        if not self._quiet:
            tqdm.write(f"lockstep: {text}", file=sys.stderr)

    def loaded(self, loaded_bytes: int, total_bytes: int) -> None:
        self._show("loading weights", "B", loaded_bytes, total_bytes)

    def captured(self, num_graphs: int, total: int) -> None:
        self._show("capturing CUDA graphs", "graph", num_graphs, total)

    def _show(self, what: str, unit: str, done: int, total: int) -> None:
        if self._quiet:
            return
        if self._bar is None or self._bar.desc != what:
            if self._bar is not None:
                self._bar.close()
            self._bar = tqdm(desc=what, total=total, unit=unit, unit_scale=True, leave=False)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
