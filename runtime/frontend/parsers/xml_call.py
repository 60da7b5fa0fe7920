"""A call of a tool as Qwen3-Coder writes it: tags that look like XML, around texts as they are.

For instance <function=look><parameter=at>the door</parameter></function>; there may be a line break
at both ends of a value, and white space between tags.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from runtime.frontend.parsers.events import CallStart
from runtime.frontend.parsers.json_call import Outcome
from runtime.frontend.parsers.json_text import escape, refuse_constant
from runtime.frontend.parsers.reading import Output, Read, read_marker, read_until, skip_space

# The tools' parameters, a JSON schema for each name of a tool: a value's text doesn't say its type.
Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]

_FUNCTION = "<function="
_PARAMETER = "<parameter="
_END_OF_FUNCTION = "</function>"
_END_OF_PARAMETER = "</parameter>"
XML_MARKS = (_FUNCTION, _PARAMETER, _END_OF_FUNCTION, _END_OF_PARAMETER)


def read_xml_call(output: Output, place: int, parameters: Parameters) -> Read[Outcome]:
    """Reads the call whose tag begins here; it is one once its name is read.

    Values of parameters that are texts by the tool's schema come as they are written; any other is
    what its JSON says, or else a text.
    """
    marker = yield from read_marker(output, (_FUNCTION,))
    name = (yield from _read_name(output)) if marker == _FUNCTION else ""
    if not name or output.char != ">":
        return Outcome.NO_CALL
    output.give(CallStart(place, name))
    output.give_arguments(place, "{")
    yield
    properties = parameters.get(name, {}).get("properties")
    kinds = properties if isinstance(properties, Mapping) else {}
    separator = ""
    while True:
        yield from skip_space(output)
        marker = yield from read_marker(output, (_PARAMETER, _END_OF_FUNCTION))
        if marker == _END_OF_FUNCTION:
            output.give_arguments(place, "}")
            return Outcome.CALL
        key = (yield from _read_name(output)) if marker == _PARAMETER else ""
        if not key or output.char != ">":
            output.give_arguments(place, marker + key)
            return Outcome.BROKEN
        output.give_arguments(place, f'{separator}"{escape(key)}": ')
        yield
        yield from _read_value(output, place, is_text=_is_text(kinds.get(key)))
        separator = ", "


def _read_name(output: Output) -> Read[str]:
    """What stands before the tag's closing bracket, or before what can't be in a name."""
    name = ""
    while output.char and output.char not in "\n<>":
        name += output.char
        yield
    return name


def _read_value(output: Output, place: int, *, is_text: bool) -> Read[None]:
    """Gives the value: a text while it comes, another one when it is there."""

    def give_text(text: str) -> None:
        output.give_arguments(place, escape(text))

    if output.char == "\n":
        yield
    if is_text:
        output.give_arguments(place, '"')
        found = yield from read_until(output, (_END_OF_PARAMETER,), give_text)
        if found.marker:
            give_text(found.space.removesuffix("\n"))
            output.give_arguments(place, '"')
        return
    pieces: list[str] = []
    found = yield from read_until(output, (_END_OF_PARAMETER,), pieces.append)
    text = "".join(pieces) + found.space.removesuffix("\n")
    output.give_arguments(place, _as_json(text))


def _is_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _as_json(text: str) -> str:
    """`text` if it is JSON, or else a string of it."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return f'"{escape(text)}"'
    return text.strip()
