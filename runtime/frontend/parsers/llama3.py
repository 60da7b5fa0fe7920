"""Calls that are the whole output: those of Llama 3, and those that a grammar has enforced."""

from functools import partial

from runtime.frontend.parsers.events import CallStart
from runtime.frontend.parsers.json_call import Outcome, read_call
from runtime.frontend.parsers.json_text import read_object
from runtime.frontend.parsers.reading import Output, Read, read_marker, skip_space

_TAG = "<|python_tag|>"
_FUNCTION = "<function="
_END_OF_FUNCTION = "</function>"
LLAMA3_MARKS = (_TAG, _FUNCTION, _END_OF_FUNCTION)


def read_llama3(output: Output) -> Read[None]:
    """Reads calls as JSON objects after an optional tag, or as <function=look>{...}</function>.

    They are separated by white space or semicolons. An output that doesn't begin with a call is
    content, and so is what follows the last one.
    """
    yield from _read_calls(output, ";", has_tags=True)


def read_enforced(output: Output) -> Read[None]:
    """Reads what `call_schema` forces: one call, or a list of them."""
    yield from _read_calls(output, "[,]", has_tags=False)


def _read_calls(output: Output, separators: str, *, has_tags: bool) -> Read[None]:
    place = 0
    outcome = Outcome.CALL
    while outcome is Outcome.CALL:
        output.mark()
        while output.char.isspace() or (output.char and output.char in separators):
            yield
        if place and not output.char:
            return
        outcome = yield from _read_call(output, place, has_tags=has_tags)
        seen = output.since_mark()
        place += 1
    if outcome is Outcome.NO_CALL:
        output.give_content(seen)
    while outcome is Outcome.BROKEN and output.char:
        output.give_arguments(place - 1, output.char)
        yield


def _read_call(output: Output, place: int, *, has_tags: bool) -> Read[Outcome]:
    marker = ""
    if has_tags and output.char == "<":
        marker = yield from read_marker(output, (_TAG, _FUNCTION))
    if marker == _TAG:
        yield from skip_space(output)
    if marker == _FUNCTION:
        return (yield from _read_tagged_call(output, place))
    if output.char != "{" or marker not in ("", _TAG):
        return Outcome.NO_CALL
    return (yield from read_call(output, place, needs_arguments=True))


def _read_tagged_call(output: Output, place: int) -> Read[Outcome]:
    name = ""
    while output.char and output.char not in "\n<>":
        name += output.char
        yield
    if not name or output.char != ">":
        return Outcome.NO_CALL
    yield
    if output.char != "{":
        return Outcome.NO_CALL
    output.give(CallStart(place, name))
    is_whole = yield from read_object(output, partial(output.give_arguments, place))
    if not is_whole:
        return Outcome.BROKEN
    yield from read_marker(output, (_END_OF_FUNCTION,))
    return Outcome.CALL
