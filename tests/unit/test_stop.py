"""Stop strings in a text that comes in pieces: what the whole text says, held back no longer."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.frontend.stop import StopFinder, StopMatch

pytestmark = pytest.mark.unit


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """End and stop string of the first match, looking at the whole text at each character."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(found, key=len)
    return None


def cut(pieces: Iterable[str], stops: Sequence[str]) -> tuple[str, str | None]:
    """All that comes before a match, and what matched."""
    finder = StopFinder(stops)
    given_out: list[str] = []
    for piece in pieces:
        result = finder.push(piece)
        if isinstance(result, StopMatch):
            return "".join(given_out) + result.before, result.stop
        given_out.append(result)
    return "".join(given_out) + finder.flush(), None


def whole(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    match = first_match(text, stops)
    if match is None:
        return text, None
    end, stop = match
    return text[: end - len(stop)], stop


def splits(text: str, longest: int = 3) -> Iterator[list[str]]:
    """All ways to cut `text` into pieces of 1 to `longest` characters."""
    if not text:
        yield []
    for size in range(1, min(longest, len(text)) + 1):
        for rest in splits(text[size:], longest):
            yield [text[:size], *rest]


CASES = [
    ("STOP here", ["STOP"]),  # at the very first character
    ("it stoSTOP", ["STOP", "sto!"]),
    ("xabcabd", ["abcabd"]),
    ("aabaabaaab", ["aabaaa"]),
    ("ababababc", ["ababc"]),
    ("abcd", ["abcd", "c"]),  # the shorter one is complete first
    ("xabcx", ["bc", "abc", "c"]),  # complete together: the one that begins first
    ("aaaa", ["aa"]),
    ("no match", ["matches"]),
    ("ends with sto", ["stop"]),
    ("👩‍👩‍👧‍👦 e\u0301", ["\u200d👧", "\u0301"]),
    ("", ["a"]),
]


@pytest.mark.parametrize(("text", "stops"), CASES)
def test_every_split_is_cut_as_the_whole_text(text: str, stops: list[str]) -> None:
    expected = whole(text, stops)
    for pieces in splits(text):
        assert cut(pieces, stops) == expected


LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(text=st.text("ab", max_size=9), stops=STOPS)
def test_every_split_of_random_texts(text: str, stops: list[str]) -> None:
    expected = whole(text, stops)
    assert all(cut(pieces, stops) == expected for pieces in splits(text))


@given(pieces=st.lists(st.text(max_size=5)), data=st.data())
def test_any_text_and_stops(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    parts = [text[a:b] for a, b in itertools.combinations(range(min(len(text), 8) + 1), 2)]
    a_stop = st.text(min_size=1, max_size=3) | st.sampled_from(parts or ["x"])
    stops = data.draw(st.lists(a_stop, min_size=1, max_size=16))
    assert cut(pieces, stops) == whole(text, stops)


@given(pieces=st.lists(LETTERS), stops=STOPS)
def test_no_more_is_held_back_than_a_stop_string_could_begin_with(
    pieces: list[str], stops: list[str]
) -> None:
    finder = StopFinder(stops)
    text = given_out = ""
    for piece in pieces:
        result = finder.push(piece)
        if isinstance(result, StopMatch):
            break
        text += piece
        given_out += result
        beginnings = [stop[:size] for stop in stops for size in range(len(stop))]
        held = max((each for each in beginnings if text.endswith(each)), key=len)
        assert text == given_out + held


@given(pieces=st.lists(st.tuples(LETTERS, st.booleans())), stops=STOPS)
@example(pieces=[("aa", False), ("a", True)], stops=["aa"])
@example(pieces=[("aa", False), ("b", True)], stops=["a", "aab"])
def test_a_match_in_a_piece_that_does_not_count(
    pieces: list[tuple[str, bool]], stops: list[str]
) -> None:
    finder = StopFinder(stops)
    text = given_out = ""
    for piece, counts in pieces:
        ends = range(len(text) + 1, len(text) + len(piece) + 1) if counts else range(0)
        text += piece
        found = [(end, stop) for end in ends for stop in stops if text[:end].endswith(stop)]
        result = finder.push(piece, counts=counts)
        assert isinstance(result, StopMatch) == bool(found)
        if isinstance(result, StopMatch):
            end, stop = min(found, key=lambda match: (match[0], -len(match[1])))
            assert (given_out + result.before, result.stop) == (text[: end - len(stop)], stop)
            return
        given_out += result
    assert given_out + finder.flush() == text


def test_the_longest_stop_strings_are_found_after_long_false_starts() -> None:
    stops = ["a" * 1023 + char for char in "bcdefghijklmnopq"]
    pieces = [*["a" * 700] * 40, "m"]
    before, stop = cut(pieces, stops)
    assert (len(before), stop) == (700 * 40 - 1023, "a" * 1023 + "m")


def test_what_is_flushed_is_not_given_out_again() -> None:
    finder = StopFinder(["stop"])
    assert finder.push("a sto") == "a "
    assert finder.flush() == "sto"
    assert finder.flush() == ""


def test_the_splits_are_all_of_them() -> None:
    assert list(splits("abc")) == [["a", "b", "c"], ["a", "bc"], ["ab", "c"], ["abc"]]
