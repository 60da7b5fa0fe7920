"""For tests of parsers: outputs in pieces, and what has been made of them."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from runtime.frontend.parsers.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    join_events,
)
from runtime.frontend.parsers.output_parser import ToolFormat, make_parser


class Parsed(NamedTuple):
    """An answer as its reader would put it together."""

    content: str
    calls: list[tuple[str, str]]  # names and arguments
    reasoning: str = ""


def parse(
    pieces: Iterable[str],
    tools: ToolFormat = "none",
    *,
    reasoning: bool = False,
    starts_inside: bool = False,
    **options: Any,
) -> list[Event]:
    parser = make_parser(tools=tools, reasoning=reasoning, starts_inside=starts_inside, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return join_events([*events, *parser.finish()])


def put_together(events: Iterable[Event]) -> Parsed:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(place, name):
                assert place == len(calls), "calls come one after the other"
                calls.append((name, ""))
            case CallArguments(place, json):
                assert place == len(calls) - 1
                calls[place] = (calls[place][0], calls[place][1] + json)
    return Parsed(content, calls, reasoning)


def cuts(text: str) -> Iterator[list[str]]:
    """The text in one piece, in two at each position, in pairs of characters, in characters."""
    yield [text]
    for end in range(1, len(text)):
        yield [text[:end], text[end:]]
    yield [text[start : start + 2] for start in range(0, len(text), 2)]
    yield [*text]


def parse_every_cut(text: str, tools: ToolFormat = "none", **options: Any) -> Parsed:
    """What is the same for every cut."""
    expected = parse([text], tools, **options)
    for pieces in cuts(text):
        assert parse(pieces, tools, **options) == expected, pieces
    return put_together(expected)


def given_after_each(text: str, tools: ToolFormat = "none", **options: Any) -> list[Parsed]:
    """What has been given once each character was pushed."""
    return [_given(text[: end + 1], tools, **options) for end in range(len(text))]


def _given(text: str, tools: ToolFormat, **options: Any) -> Parsed:
    settings = {"reasoning": False, "starts_inside": False} | options
    parser = make_parser(tools=tools, **settings)
    return put_together([event for char in text for event in parser.push(char)])
