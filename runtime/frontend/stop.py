"""Where a text that comes in pieces meets a stop string."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that the text has come to contain."""

    stop: str
    before: str  # what the last piece and the text held back before it have in front of it


class StopFinder:
    """Finds stop strings in a text, holding back no more of it than could belong to one.

    The first match is the one that is complete first, character by character; of those that end
    with the same character, the one that begins first, which is the longest. So it depends on the
    text alone, not on its pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`, none of them empty."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._is_inside = False  # whether the text ends with the beginning of a stop string
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> str | StopMatch:
        """The text that is certain to stand before any match to come, or the first match.

        A match that is completed by this piece doesn't count without `counts`; its text goes on as
        any other. Nothing may be pushed after a match.
        """
        text, start = self._held + text, len(self._held)
        for end, char in enumerate(text[start:], start + 1):
            if not self._is_inside and char not in self._first_chars:
                continue
            found = self._feed(char)
            if found is not None and counts:
                self._held = ""
                return StopMatch(found, text[: end - len(found)])
        # Whatever a match to come begins with is held back, so no match is longer than the text.
        border = len(text) - max(matcher.num_open for matcher in self._matchers)
        self._held = text[border:]
        return text[:border]

    def flush(self) -> str:
        """What is held back: the text has ended."""
        held, self._held = self._held, ""
        return held

    def _feed(self, char: str) -> str | None:
        """The longest stop string that ends with `char`, the text's next one."""
        ended = [matcher.stop for matcher in self._matchers if matcher.feed(char)]
        self._is_inside = any(matcher.num_open for matcher in self._matchers)
        return max(ended, key=len, default=None)


class _Matcher:
    """How far the end of a text agrees with the beginning of one stop string.

    Knuth, Morris, Pratt: Fast Pattern Matching in Strings, 1977; the table grows as it is needed,
    since few texts come near the end of a long stop string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        # Length of the longest proper prefix of the stop string that the text ends with.
        self.num_open = 0
        # For each length: that of the longest shorter prefix that the prefix so long ends with.
        self._fallbacks = [0, 0]

    def feed(self, char: str) -> bool:
        """Whether the text, now longer by `char`, ends with the stop string."""
        length = self._agreeing(self.num_open, char)
        if length < len(self.stop):
            self.num_open = length
            return False
        self.num_open = self._fallback(length)
        return True

    def _agreeing(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback(length)
        return length + (self.stop[length] == char)

    def _fallback(self, length: int) -> int:
        for end in range(len(self._fallbacks) - 1, length):
            self._fallbacks.append(self._agreeing(self._fallbacks[end], self.stop[end]))
        return self._fallbacks[length]
