"""What the person who waits for a batch sees."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tqdm import tqdm


class BatchProgress:
    """A bar over the lines on stderr, with tokens a second; nothing if `quiet` or no terminal."""

    def __init__(
        self,
        total: int,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._started_at = clock()
        self._num_tokens = 0
        self._bar = tqdm(
            desc="batch",
            total=total,
            unit="line",
            file=sys.stderr,
            disable=quiet or not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def line(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        elapsed_s = max(self._clock() - self._started_at, 1e-9)
        if num_tokens:
            rate = self._num_tokens / elapsed_s
            self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
        self._bar.update(1)
