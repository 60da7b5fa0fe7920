"""Reasoning before an answer, with calls and without; any output in any pieces."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.frontend.parsers.output_parser import (
    ToolFormat,
    detect_reasoning,
    detect_tools,
    starts_inside,
)
from tests.chats import DATA, GEMMA_TEMPLATE
from tests.parsing import Parsed, given_after_each, parse, parse_every_cut, put_together

pytestmark = pytest.mark.unit

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
OUTSIDE = [
    ("<think>\nhm\n\nso\n</think>\n\nYes.\n", Parsed("Yes.\n", [], "hm\n\nso")),
    (" \n<think>hm</think>Yes.", Parsed("Yes.", [], "hm")),
    ("<think>\n\n</think>\n\nYes.", Parsed("Yes.", [], "")),
    (f"<think>hm {CALL}</think>\n{CALL}", Parsed("", [("f", "{}")], f"hm {CALL}")),
    ("<think> a </thin </think> <think>b</think>", Parsed("<think>b</think>", [], " a </thin")),
    ("<think>\nhm \n", Parsed("", [], "hm \n")),
    ("<think>", Parsed("", [], "")),
    (" Yes. <think>no</think>", Parsed(" Yes. <think>no</think>", [], "")),
    (CALL, Parsed("", [("f", "{}")], "")),
    ("</think> Yes", Parsed("</think> Yes", [], "")),
    ("<thi", Parsed("<thi", [], "")),
    ("<thinner", Parsed("<thinner", [], "")),
    ("", Parsed("", [], "")),
    (" \n", Parsed(" \n", [], "")),
]
INSIDE = [
    ("hm\n</think>\n\nYes.", Parsed("Yes.", [], "hm")),
    ("\nhm", Parsed("", [], "hm")),
    ("\n hm </think>", Parsed("", [], " hm")),
    ("</think>Yes.", Parsed("Yes.", [], "")),
    ("\n</think>\n\nYes.", Parsed("Yes.", [], "")),
    ("<think>\nhm</think>\nYes.", Parsed("Yes.", [], "hm")),
    ("<<think></think>", Parsed("", [], "<<think>")),
    ("<t</think>Yes.", Parsed("Yes.", [], "<t")),
    (f"hm</think>\n{CALL}", Parsed("", [("f", "{}")], "hm")),
    (CALL, Parsed("", [], CALL)),
    ("", Parsed("", [], "")),
]


@pytest.mark.parametrize(("text", "expected"), OUTSIDE)
def test_reasoning_in_every_cut(text: str, expected: Parsed) -> None:
    assert parse_every_cut(text, "hermes", reasoning=True) == expected


@pytest.mark.parametrize(("text", "expected"), INSIDE)
def test_reasoning_that_the_prompt_began(text: str, expected: Parsed) -> None:
    assert parse_every_cut(text, "hermes", reasoning=True, starts_inside=True) == expected


def test_without_reasoning_tags_are_content() -> None:
    assert parse_every_cut("<think>hm</think>") == Parsed("<think>hm</think>", [])


def test_reasoning_and_answer_are_given_at_once() -> None:
    given = given_after_each("<think>hm</think>Yes", reasoning=True)
    assert [each.reasoning for each in given[7:9]] == ["h", "hm"]
    assert [each.content for each in given[-3:]] == ["Y", "Ye", "Yes"]


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "```tool_code",
        "```",
    ),
    *("<start_function_call>", "<end_function_call>", "<escape>", "call:f{", "a:1", "<function=f>"),
    *("<parameter=p>", "</parameter>", "</function>", '{"name": "f"', ', "arguments": ', "{}", "}"),
    *('{"name": "f", "parameters": {"a": [1, "x"]}}', '"arguments": "{\\"a\\": 1}"', "[f(a=1)]"),
    *("<", "{", "[", "]", '"', "\\", "\n", " ", ";", ",", "text", "ü", "\u2028", "f(", "(a=1)"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=2), max_size=12)


@given(fragments=TEXTS, tools=st.sampled_from(get_args(ToolFormat)), data=st.data())
def test_any_output_in_any_pieces(
    fragments: list[str], tools: ToolFormat, data: st.DataObject
) -> None:
    text = "".join(fragments)
    options = {"reasoning": data.draw(st.booleans()), "starts_inside": data.draw(st.booleans())}
    whole = parse([text], tools, **options)
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert parse(pieces, tools, **options) == parse([*text], tools, **options) == whole
    parsed = put_together(whole)
    if not parsed.calls and not options["reasoning"]:
        assert parsed.content.strip() in text
        assert "<start_function_response>" in text or parsed.content == text


QWEN = "{{ '<tool_call>\\n{\"name\": ' }} {% set x = content.split('</think>') %}"
LLAMA = """{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}"""


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN, "hermes", True),
        (LLAMA, "llama3", False),
        ('{{ "give \\"parameters\\" of its" }}', "llama3", False),
        ("{{ '<|python_tag|>' }}", "llama3", False),
        ("{{ '<start_function_call>call:' }}", "gemma", False),
        ("{{ '<|tool_call>call:' }}", "gemma", False),
        ("write ```tool_code", "gemma", False),
        ("{{ messages }}", "none", False),
        ((DATA / "headers_with_tools.jinja").read_text(), "llama3", True),
        ((DATA / "chatml.jinja").read_text(), "none", True),
        (GEMMA_TEMPLATE.read_text(), "none", False),
    ],
)
def test_what_a_template_tells(template: str, tools: str, reasoning: bool) -> None:
    assert (detect_tools(template), detect_reasoning(template)) == (tools, reasoning)


def test_whether_a_prompt_ends_inside_of_reasoning() -> None:
    assert starts_inside("<|im_start|>assistant\n<think>\n")
    assert not starts_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not starts_inside("")
