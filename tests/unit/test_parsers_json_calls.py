"""Calls of tools as JSON, in the forms of Hermes and Llama 3, and enforced ones."""

import json

import pytest

from runtime.frontend.parsers.events import CallArguments, CallStart
from tests.parsing import Parsed, given_after_each, parse, parse_every_cut

pytestmark = pytest.mark.unit

LOOK = '{"name": "look", "arguments": {"far": true, "at": "a } \\" {"}}'
LOOK_CALL = ("look", '{"far": true, "at": "a } \\" {"}')
WAIT = '{"name": "wait", "arguments": {}}'
WAIT_CALL = ("wait", "{}")


def tagged(*calls: str, between: str = "\n") -> str:
    return between.join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


HERMES = [
    ("no call", Parsed("no call", [])),
    ("  a <b> < c\n\n", Parsed("  a <b> < c\n\n", [])),
    (tagged(LOOK), Parsed("", [LOOK_CALL])),
    (f"\n{tagged(LOOK)}\n", Parsed("", [LOOK_CALL])),
    (tagged(LOOK, WAIT), Parsed("", [LOOK_CALL, WAIT_CALL])),
    (tagged(LOOK, WAIT, between=""), Parsed("", [LOOK_CALL, WAIT_CALL])),
    (f"Let me.\n{tagged(LOOK)}", Parsed("Let me.", [LOOK_CALL])),
    (f"One {tagged(LOOK)}\ntwo {tagged(WAIT)} 3 ", Parsed("One\ntwo 3", [LOOK_CALL, WAIT_CALL])),
    (f"<<tool_call>{WAIT}</tool_call>", Parsed("<", [WAIT_CALL])),
    (f"<tool_<tool_call>{WAIT}</tool_call>", Parsed("<tool_", [WAIT_CALL])),
    # the other order, the other name, other keys
    (tagged('{"arguments": {"a": [1]}, "name": "f"}'), Parsed("", [("f", '{"a": [1]}')])),
    (tagged('{"type":"function","name":"f","parameters":{}}'), Parsed("", [("f", "{}")])),
    (tagged('{"name": "f", "arguments": {}, "more": {"a": "}"}}'), Parsed("", [("f", "{}")])),
    (tagged('{"name": "f"}'), Parsed("", [("f", "{}")])),
    (tagged(r'{"name": "f\u00fc\"", "arguments": {}}'), Parsed("", [('fü"', "{}")])),
    # arguments as a text
    (
        tagged(r'{"name": "f", "arguments": "{\"a\": \"\\\"x\\n\u00e9\"}"}'),
        Parsed("", [("f", r'{"a": "\"x\né"}')]),
    ),
    (
        tagged(r'{"arguments": " {\"a\": \"\ud83d\ude00\"} ", "name": "f"}'),
        Parsed("", [("f", r'{"a": "\ud83d\ude00"}')]),
    ),
    # what an output that was cut off, or a tag that is missing, leaves
    ("<tool_call>", Parsed("<tool_call>", [])),
    ("x <tool_ca", Parsed("x <tool_ca", [])),
    ('<tool_call>{"name": "lo', Parsed('<tool_call>{"name": "lo', [])),
    ('<tool_call>{"name": "f", "arguments": {"a": "b', Parsed("", [("f", '{"a": "b')])),
    (f"<tool_call>{WAIT}", Parsed("", [WAIT_CALL])),
    (f"<tool_call>{WAIT}\n<tool_call>{LOOK}", Parsed("", [WAIT_CALL, LOOK_CALL])),
    (f"{tagged(WAIT)} </tool_call>", Parsed(" </tool_call>", [WAIT_CALL])),
    # a bracket too few, a bracket too many
    (tagged(LOOK[:-1], WAIT), Parsed("", [LOOK_CALL, WAIT_CALL])),
    (tagged(LOOK[:-2], WAIT), Parsed("", [(LOOK_CALL[0], LOOK_CALL[1][:-1] + "\n"), WAIT_CALL])),
    (tagged(LOOK + "}"), Parsed("}", [LOOK_CALL])),
    # Python's literals
    (tagged('{"name": "f", "arguments": {"a": True}}'), Parsed("", [("f", '{"a": True}')])),
    (tagged("{'name': 'f', 'arguments': {}}"), None),
    (
        tagged('{"name": "f", "arguments": {\'a\': 1}}', WAIT),
        Parsed("", [("f", "{'a': 1}}"), WAIT_CALL]),
    ),
    # no calls
    (tagged("{}"), None),
    (tagged("nothing"), None),
    (tagged('{"name": 3, "arguments": {}}'), None),
    (tagged('{"name": "", "arguments": {}}'), None),
    (tagged('{"arguments": {}, "name": ""}'), None),
    (tagged(r'{"name": "\ud800", "arguments": {}}'), None),
    (tagged(r'{"name": "\x", "arguments": {}}'), None),
    (tagged('{"name": "a\nb", "arguments": {}}'), None),
    (tagged('{"name": "f", "arguments": [1]}'), None),
    (tagged('{"name": "f", "arguments": "text"}'), None),
    (tagged('{"arguments": "{} {}", "name": "f"}'), None),
    (tagged(r'{"arguments": "{\"a\": \q}", "name": "f"}'), None),
    (tagged('{"arguments": {}}'), None),
    (tagged('{"arguments": {}, "arguments": {}, "name": "f"}'), None),
    (tagged('{"answer": 1, "name": "f", "arguments": {}}'), None),
    (tagged('{"name" "f"}'), None),
]


@pytest.mark.parametrize(("text", "expected"), HERMES)
def test_hermes_calls_in_every_cut(text: str, expected: Parsed | None) -> None:
    assert parse_every_cut(text, "hermes") == (expected or Parsed(text, []))


def test_a_text_that_is_no_call_does_not_hide_the_next_one() -> None:
    text = f'Look:\n<tool_call>{{"name": 3}}</tool_call>\n{tagged(WAIT)}'
    assert parse_every_cut(text, "hermes") == Parsed(text[: text.rindex("\n<tool")], [WAIT_CALL])


def test_line_breaks_in_strings_of_arguments_become_json() -> None:
    text = tagged('{"name": "write", "arguments": {"code": "a\n\tb"}}')
    ((name, arguments),) = parse_every_cut(text, "hermes").calls
    assert (name, json.loads(arguments)) == ("write", {"code": "a\n\tb"})


def test_deep_arguments_are_read_without_recursion() -> None:
    deep = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert parse([tagged(f'{{"name": "f", "arguments": {deep}}}')], "hermes") == [
        CallStart(0, "f"),
        CallArguments(0, deep),
    ]


def test_hermes_gives_what_is_certain_at_once() -> None:
    text = 'Hi!\n<tool_call>\n{"name": "f", "arguments": {"a": "bc"}}'
    given = dict(
        zip(
            [text[: end + 1] for end in range(len(text))],
            given_after_each(text, "hermes"),
            strict=True,
        )
    )
    assert given["Hi!"].content == "Hi!"
    assert given['Hi!\n<tool_call>\n{"name": "f", "arguments": '].calls == []
    for end in range(len('{"a": "bc"}')):
        arguments = '{"a": "bc"}'[: end + 1]
        after = 'Hi!\n<tool_call>\n{"name": "f", "arguments": ' + arguments
        assert given[after] == Parsed("Hi!", [("f", arguments)])


def test_only_what_may_begin_a_tag_is_held_back() -> None:
    given = [each.content for each in given_after_each("a <b\n c", "hermes")]
    assert given == ["a", "a", "a", "a <b", "a <b", "a <b", "a <b\n c"]


LLAMA_LOOK = LOOK.replace("arguments", "parameters")
LLAMA_WAIT = WAIT.replace("arguments", "parameters")
LLAMA3 = [
    (LLAMA_LOOK, Parsed("", [LOOK_CALL])),
    (f"\n<|python_tag|> {LLAMA_LOOK}\n", Parsed("", [LOOK_CALL])),
    (f"<|python_tag|>{LLAMA_LOOK}; {LLAMA_WAIT}", Parsed("", [LOOK_CALL, WAIT_CALL])),
    (f"{LLAMA_WAIT}\n{LLAMA_LOOK};", Parsed("", [WAIT_CALL, LOOK_CALL])),
    (WAIT, Parsed("", [WAIT_CALL])),
    (
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        Parsed("", [("f", '{"a": 1}')]),
    ),
    (
        '<function=f>{"a": "</function>"}</function>\n<function=wait>{}</function>',
        Parsed("", [("f", '{"a": "</function>"}'), WAIT_CALL]),
    ),
    ('<function=f>{"a": 1', Parsed("", [("f", '{"a": 1')])),
    (f"{LLAMA_WAIT}; that's all", Parsed("; that's all", [WAIT_CALL])),
    (f"{LLAMA_WAIT}\n<|python", Parsed("\n<|python", [WAIT_CALL])),
    (LLAMA_LOOK[:-1] + ";" + LLAMA_WAIT, Parsed("", [LOOK_CALL, WAIT_CALL])),
    ('{"name": "f", "parameters": {"a": (1)}}', Parsed("", [("f", '{"a": (1)}}')])),
    # no calls
    (f"Sure: {LLAMA_LOOK}", None),
    ("", None),
    (" \n", None),
    ("plain", None),
    ('{"name": "Ada"}', None),
    ('{"name": "Ada", "born": 1815}', None),
    ('{"name": "Ada", "par', None),
    ('{"parameters": {"a": 1}}', None),
    ("<|python_tag|>print(1)", None),
    ("<|python_", None),
    ("<function=f>text", None),
    ("<function=>{}", None),
    ("<b>", None),
    (";{}", None),
]


@pytest.mark.parametrize(("text", "expected"), LLAMA3)
def test_llama3_calls_in_every_cut(text: str, expected: Parsed | None) -> None:
    assert parse_every_cut(text, "llama3") == (expected or Parsed(text, []))


def test_llama3_gives_what_is_certain_at_once() -> None:
    assert given_after_each('{"name": "f", "parameters": {', "llama3")[-1].calls == [("f", "{")]
    assert given_after_each('{"answer":', "llama3")[-1].content == '{"answer":'
    assert given_after_each("Well", "llama3")[0].content == "W"


ENFORCED = [
    (LOOK, Parsed("", [LOOK_CALL])),
    (f"[{LOOK}]", Parsed("", [LOOK_CALL])),
    (f"[{LOOK}, {WAIT},{WAIT}]", Parsed("", [LOOK_CALL, WAIT_CALL, WAIT_CALL])),
    (f"[{WAIT}, {LOOK[:-10]}", Parsed("", [WAIT_CALL, ("look", LOOK_CALL[1][:-8].rstrip())])),
    (f'[{WAIT}, {{"na', Parsed(', {"na', [WAIT_CALL])),
    ('[{"name', None),
]


@pytest.mark.parametrize(("text", "expected"), ENFORCED)
def test_enforced_calls_in_every_cut(text: str, expected: Parsed | None) -> None:
    assert parse_every_cut(text, "enforced") == (expected or Parsed(text, []))


def test_enforced_calls_are_never_taken_for_reasoning() -> None:
    assert parse_every_cut(LOOK, "enforced", reasoning=True, starts_inside=True).calls == [
        LOOK_CALL
    ]
