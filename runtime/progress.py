"""What start-up tells the person who waits for it."""

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm


class StartupProgress:
    """Messages and a bar of loaded weights on stderr; nothing if `quiet`."""

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
        if self._quiet:
            return
        if self._bar is None:
            self._bar = tqdm(
                desc="loading weights", total=total_bytes, unit="B", unit_scale=True, leave=False
            )
        self._bar.total = total_bytes
        self._bar.update(loaded_bytes - self._bar.n)
