"""Calls of Gemma models: between special tokens, or written in Python.

Gemma 3 has no form of its own. Its guides ask for a fence of `tool_code`, or for an output that is
nothing but a list of calls: [look(far=True)].
"""

from runtime.frontend.parsers.events import CallStart
from runtime.frontend.parsers.hermes import read_broken_arguments
from runtime.frontend.parsers.json_call import Outcome
from runtime.frontend.parsers.marked_call import Marks, read_marked_call
from runtime.frontend.parsers.pythonic import PythonCall, read_python_calls
from runtime.frontend.parsers.reading import Output, Read, read_until, skip_space

FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')
_MARKS = {marks.opening: marks for marks in (FUNCTION_GEMMA, GEMMA4)}
# Where a model waits for results; what it would write after that isn't meant for anyone.
_WAITING = ("<start_function_response>", "<|tool_response>")
GEMMA_MARKS = (*FUNCTION_GEMMA, *GEMMA4, *_WAITING)
FENCE = "```tool_code"
_END_OF_FENCE = "```"


def read_gemma(output: Output) -> Read[None]:
    """Reads calls and the content around them; what is no call stays content as it is."""
    space, place = yield from _read_list(output)
    openings = (*_MARKS, *_WAITING, FENCE)
    while True:
        found = yield from read_until(output, openings, output.give_content, space=space)
        space = ""
        if not found.marker:
            # Behind calls it says nothing.
            output.give_content("" if place else found.space)
            return
        if found.marker == FENCE:
            place = yield from _read_fence(output, place, found.space)
        elif found.marker in _MARKS:
            output.mark()
            marks = _MARKS[found.marker]
            outcome = yield from read_marked_call(output, place, marks.quote)
            seen = output.since_mark()
            if outcome is Outcome.NO_CALL:
                output.give_content(found.space + found.marker + seen)
                continue
            if outcome is Outcome.BROKEN:
                yield from read_broken_arguments(output, place, marks.closing)
            else:
                yield from read_until(output, (marks.closing,), output.give_content)
            place += 1


def _read_list(output: Output) -> Read[tuple[str, int]]:
    """Reads the output if it is a list of calls. White space before another one, number of calls.

    Once a name and its bracket are there, the rest is held back, as it may belong to a call.
    """
    output.mark()
    yield from skip_space(output)
    if output.char != "[":
        return output.since_mark(), 0
    yield
    yield from skip_space(output)
    is_name = output.char.isidentifier()
    while output.char.isidentifier() or output.char.isdecimal() or output.char == ".":
        yield
    yield from skip_space(output)
    if is_name and output.char == "(":
        while output.char:
            yield
    text = output.since_mark()
    calls = None if output.char else read_python_calls(text)
    if calls is None:
        output.give_content(text)
        return "", 0
    _give_calls(output, calls, place=0)
    return "", len(calls)


def _read_fence(output: Output, place: int, space: str) -> Read[int]:
    """Reads code up to the end of its fence, or of the output. The number of calls so far."""
    pieces: list[str] = []
    found = yield from read_until(output, (_END_OF_FENCE,), pieces.append)
    code = "".join(pieces)
    calls = read_python_calls(code)
    if calls is None:
        output.give_content(space + FENCE + code + found.space + found.marker)
        return place
    _give_calls(output, calls, place=place)
    return place + len(calls)


def _give_calls(output: Output, calls: list[PythonCall], *, place: int) -> None:
    for offset, call in enumerate(calls):
        output.give(CallStart(place + offset, call.name))
        output.give_arguments(place + offset, call.arguments)
