"""Calls of Hermes, Qwen and many others, which stand between tags in a text.

    <tool_call>
    {"name": "look", "arguments": {"far": true}}
    </tool_call>

In Qwen3-Coder's tags is no JSON; `xml_call` reads that.
"""

from functools import partial

from runtime.frontend.parsers.json_call import Outcome, read_call
from runtime.frontend.parsers.reading import Output, Read, read_until, skip_space
from runtime.frontend.parsers.xml_call import XML_MARKS, Parameters, read_xml_call

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
HERMES_MARKS = (OPENING, CLOSING, *XML_MARKS)


def read_hermes(output: Output, parameters: Parameters) -> Read[None]:
    """Reads calls and the content around them; what is no call stays content with its tags."""
    place = 0
    markers: tuple[str, ...] = (OPENING,)
    while True:
        marker, space = yield from read_until(output, markers, output.give_content)
        if not marker:
            # Behind calls it says nothing.
            output.give_content("" if place else space)
            return
        if marker == CLOSING:
            markers = (OPENING,)
            continue
        output.mark()
        yield from skip_space(output)
        outcome = Outcome.NO_CALL
        if output.char == "{":
            outcome = yield from read_call(output, place, needs_arguments=False)
        elif output.char == "<":
            outcome = yield from read_xml_call(output, place, parameters)
        seen = output.since_mark()
        if outcome is Outcome.NO_CALL:
            output.give_content(space + OPENING + seen)
            markers = (OPENING,)
            continue
        markers = (OPENING, CLOSING)
        if outcome is Outcome.BROKEN:
            yield from read_broken_arguments(output, place, CLOSING)
            markers = (OPENING,)
        place += 1


def read_broken_arguments(output: Output, place: int, end: str) -> Read[None]:
    """Gives as arguments what comes before `end`: whoever called the model sees what it wrote."""
    give = partial(output.give_arguments, place)
    found = yield from read_until(output, (end,), give)
    if not found.marker:
        give(found.space)
