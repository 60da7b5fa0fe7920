"""Shows several texts that grow at the same time."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Protocol, TextIO

UP, CLEAR_TO_END = "\x1b[{}F", "\x1b[J"
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


class Screen(Protocol):
    """Text number `index` goes on."""

    def add(self, index: int, text: str) -> None: ...

    def close(self) -> None: ...


def open_screen(titles: Sequence[str], output: TextIO) -> Screen:
    """Panels on a terminal; elsewhere lines, each with the number of its text."""
    if output.isatty():
        return PanelScreen(titles, output)
    return LineScreen(titles, output)


class PanelScreen:
    """A panel per text, drawn again with each piece of text; the last lines of each are seen."""

    def __init__(self, titles: Sequence[str], output: TextIO) -> None:
        self._output = output
        self._titles = titles
        self._texts = ["" for _ in titles]
        self._num_drawn = 0
        self._draw()

    def add(self, index: int, text: str) -> None:
        self._texts[index] += text
        self._draw()

    def close(self) -> None:
        self._output.flush()

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        height = max(2, min(5, (size.lines - 2) // len(self._titles) - 1))
        lines: list[str] = []
        for title, text in zip(self._titles, self._texts, strict=True):
            shown = wrap(text, size.columns - 3)[-height:]
            lines.append(f"{BOLD}{title[: size.columns - 1]}{PLAIN}")
            lines += [f"  {line.strip()}" for line in shown + [""] * (height - len(shown))]
        up = UP.format(self._num_drawn) if self._num_drawn else ""
        self._output.write(up + CLEAR_TO_END + "\n".join(lines) + "\n")
        self._output.flush()
        self._num_drawn = len(lines)


class LineScreen:
    """A line appears when it is full, or when the screen is closed; empty ones don't."""

    WIDTH = 92

    def __init__(self, titles: Sequence[str], output: TextIO) -> None:
        self._output = output
        self._pending = ["" for _ in titles]
        for index, title in enumerate(titles):
            self._write(index, title)

    def add(self, index: int, text: str) -> None:
        *full, rest = wrap(self._pending[index] + text, self.WIDTH)
        for line in full:
            self._write(index, line)
        self._pending[index] = rest

    def close(self) -> None:
        for index, rest in enumerate(self._pending):
            if rest:
                self._write(index, rest)
        self._pending = ["" for _ in self._pending]

    def _write(self, index: int, line: str) -> None:
        if line.strip():
            print(f"[{index + 1}] {line.strip()}", file=self._output, flush=True)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, at least one; spaces at the end of the last one stay."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        broken = textwrap.wrap(paragraph, width, drop_whitespace=False, break_on_hyphens=False)
        lines += broken or [""]
    return lines
