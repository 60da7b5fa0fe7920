"""Which parser a model's output needs."""

from collections.abc import Mapping
from functools import partial
from typing import Literal, TypeAlias

from runtime.frontend.parsers.events import Content, Event, OutputParser
from runtime.frontend.parsers.gemma import (
    FENCE,
    FUNCTION_GEMMA,
    GEMMA4,
    GEMMA_MARKS,
    read_gemma,
)
from runtime.frontend.parsers.hermes import HERMES_MARKS, OPENING, read_hermes
from runtime.frontend.parsers.llama3 import LLAMA3_MARKS, read_enforced, read_llama3
from runtime.frontend.parsers.reading import CharacterParser
from runtime.frontend.parsers.thinking import CLOSING as END_OF_THINKING
from runtime.frontend.parsers.thinking import OPENING as THINKING
from runtime.frontend.parsers.thinking import ThinkingParser
from runtime.frontend.parsers.xml_call import Parameters

ToolFormat: TypeAlias = Literal["hermes", "llama3", "gemma", "enforced", "none"]


_MARKS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": HERMES_MARKS,
    "llama3": LLAMA3_MARKS,
    "gemma": GEMMA_MARKS,
    "enforced": (),
    "none": (),
}


class PlainParser:
    """All is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def make_parser(
    *,
    tools: ToolFormat,
    reasoning: bool,
    starts_inside: bool,
    parameters: Parameters | None = None,
) -> OutputParser:
    """A parser for one output.

    `tools` is how calls are written: "enforced" where `call_schema` forced them, in which case the
    output has no reasoning, since the schema leaves no room for it. `starts_inside` says that the
    prompt ends inside of the reasoning. `parameters` are the tools' JSON schemas by name; without,
    Qwen3-Coder's values are what they look like.
    """
    answer: OutputParser
    match tools:
        case "hermes":
            answer = CharacterParser(partial(read_hermes, parameters=parameters or {}))
        case "llama3":
            answer = CharacterParser(read_llama3)
        case "gemma":
            answer = CharacterParser(read_gemma)
        case "enforced":
            return CharacterParser(read_enforced)
        case "none":
            answer = PlainParser()
    return ThinkingParser(answer, starts_inside=starts_inside) if reasoning else answer


def marks_of(*, tools: ToolFormat, reasoning: bool) -> tuple[str, ...]:
    """What a parser looks for that a tokenizer may have as special tokens."""
    return (*_MARKS[tools], *((THINKING, END_OF_THINKING) if reasoning else ()))


def detect_tools(template: str) -> ToolFormat:
    """How a model writes calls, by the source of its chat template."""
    if any(mark in template for mark in (FUNCTION_GEMMA.opening, GEMMA4.opening)):
        return "gemma"
    if OPENING in template:
        return "hermes"
    if FENCE.removeprefix("```") in template:
        return "gemma"
    # A template may have its text inside of quotes.
    marks = ("<|python_tag|>", '"parameters"', '\\"parameters\\"')
    return "llama3" if any(mark in template for mark in marks) else "none"


def detect_reasoning(template: str) -> bool:
    """Whether a model thinks before it answers, by the source of its chat template."""
    return THINKING in template or END_OF_THINKING in template


def starts_inside(prompt_text: str) -> bool:
    """Whether a rendered chat leaves the model in the middle of its reasoning."""
    return prompt_text.rstrip().endswith(THINKING)
