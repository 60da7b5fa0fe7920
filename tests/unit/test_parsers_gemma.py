"""Calls of Gemma models and Qwen3-Coder, which are made into JSON."""

import json

import pytest

from runtime.frontend.parsers.pythonic import MAX_CODE_CHARS, read_python_calls
from tests.parsing import Parsed, given_after_each, parse, parse_every_cut, put_together

pytestmark = pytest.mark.unit


def marked(*calls: str, between: str = "") -> str:
    return between.join(f"<start_function_call>{call}<end_function_call>" for call in calls)


WAIT = "call:wait{}"
WAIT_CALL = ("wait", "{}")
MARKED = [
    (marked(WAIT), Parsed("", [WAIT_CALL])),
    (f"Now:\n{marked(WAIT, WAIT, between=' ')}\n", Parsed("Now:", [WAIT_CALL, WAIT_CALL])),
    (f"\n\n{marked(WAIT)}", Parsed("", [WAIT_CALL])),
    (f"{marked(WAIT)}<start_function_response>", Parsed("", [WAIT_CALL])),
    (f"{marked(WAIT)} done", Parsed(" done", [WAIT_CALL])),
    (
        marked('call:look{at:<escape>a "b", {c}:\n d <escape>,num:3,far:true,x:-1.5e3}'),
        Parsed(
            "",
            [("look", r'{"at": "a \"b\", {c}:\n d ", "num": 3, "far": true, "x": -1.5e3}')],
        ),
    ),
    (
        marked("call:f{a:{b:[1, <escape>x<escape>,{c:null}],d:{}},e:[],}"),
        Parsed("", [("f", '{"a": {"b": [1, "x", {"c": null}], "d": {}}, "e": []}')]),
    ),
    (
        marked("call:f{a:bare text ,b:01,c:NaN,d:-Infinity,e:Infinity,f:-0.5}"),
        Parsed(
            "",
            [
                (
                    "f",
                    '{"a": "bare text", "b": "01", "c": "NaN", "d": "-Infinity", '
                    '"e": "Infinity", "f": -0.5}',
                )
            ],
        ),
    ),
    (marked("call:f{<escape>a<escape>:1}"), Parsed("", [("f", '{"a": 1}')])),
    (marked("call:f{a:<escape><escape>}"), Parsed("", [("f", '{"a": ""}')])),
    (
        '<|tool_call>call:a.b-c{at:<|"|>x<|"|>}<tool_call|><|tool_response>',
        Parsed("", [("a.b-c", '{"at": "x"}')]),
    ),
    # cut off, or broken
    ("<start_function_call>", None),
    ("<start_function_call>call:look", None),
    ("<start_function_call>call:f{a:<escape>b <es", Parsed("", [("f", '{"a": "b <es')])),
    ("<start_function_call>call:f{a:12", Parsed("", [("f", '{"a": 12')])),
    (marked("call:f{a}", WAIT), Parsed("", [("f", "{a}"), WAIT_CALL])),
    (marked("call:f{a:1,]}"), Parsed("", [("f", '{"a": 1]}')])),
    (marked("call:f{a:}"), Parsed("", [("f", '{"a": }')])),
    (marked("call:f{a:[1}"), Parsed("", [("f", '{"a": [1}')])),
    (marked(" nothing"), None),
    (marked("call:{}"), None),
]


@pytest.mark.parametrize(("text", "expected"), MARKED)
def test_marked_calls_in_every_cut(text: str, expected: Parsed | None) -> None:
    assert parse_every_cut(text, "gemma") == (expected or Parsed(text, []))


def test_a_quoted_text_is_given_while_it_comes() -> None:
    given = given_after_each("<start_function_call>call:f{a:<escape>bc", "gemma")
    assert [each.calls for each in given[-2:]] == [[("f", '{"a": "b')], [("f", '{"a": "bc')]]


LOOK = 'look(at="a)]", days=[1, 2.5, {"x": None}], far=True)'
LOOK_CALL = ("look", '{"at": "a)]", "days": [1, 2.5, {"x": null}], "far": true}')
PYTHONIC = [
    (f"[{LOOK}]", Parsed("", [LOOK_CALL])),
    (f" \n[{LOOK}, a.b()] ", Parsed("", [LOOK_CALL, ("a.b", "{}")])),
    (f"Now\n```tool_code\n{LOOK}\n```\n", Parsed("Now", [LOOK_CALL])),
    (f"```tool_code\nprint({LOOK})\nwait()```", Parsed("", [LOOK_CALL, WAIT_CALL])),
    (f"```tool_code\n[{LOOK}]\n```\nand{marked(WAIT)}", Parsed("\nand", [LOOK_CALL, WAIT_CALL])),
    ("```tool_code\nwait()\n", Parsed("", [WAIT_CALL])),
    ("````tool_code\nwait()\n```", Parsed("`", [WAIT_CALL])),
    (f"[1, 2]{marked(WAIT)}", Parsed("[1, 2]", [WAIT_CALL])),
    # no calls
    ("[wait()] then", None),
    ("[wait(]", None),
    ("[wait(1)]", None),
    ("[wait(**{})]", None),
    ("[wait(a=b)]", None),
    ("[wait(a=1j)]", None),
    ("[wait(a={1, 2})]", None),
    ("[wait(a=1e999)]", None),
    (r"[wait(a='\ud800')]", None),
    ("[wait(a=" + "9" * 5000 + ")]", None),
    ("[wait()()]", None),
    ("[wait", None),
    ("[1wait()]", None),
    ("[link](to)", None),
    ("[]", None),
    (" [", None),
    ("wait()", None),
    ("```tool_code\nx = wait()\n```", None),
    ("```tool_code\nprint(1)\n``", None),
    ("``` tool_code\nwait()\n```", None),
    ("```tool_code```", None),
]


@pytest.mark.parametrize(("text", "expected"), PYTHONIC)
def test_python_calls_in_every_cut(text: str, expected: Parsed | None) -> None:
    if len(text) > 1000:
        assert put_together(parse([*text], "gemma")) == Parsed(text, [])
        return
    assert parse_every_cut(text, "gemma") == (expected or Parsed(text, []))


@pytest.mark.parametrize(
    "argument",
    [
        "[" * 5_000 + "]" * 5_000,
        "-" * 20_000 + "1",
        "a" + ".a" * 20_000,
        "{1:" * 80 + "1" + "}" * 80,
        "'" + "x" * MAX_CODE_CHARS + "'",
    ],
)
def test_deep_and_long_code_is_no_call_or_a_call(argument: str) -> None:
    calls = read_python_calls(f"[f(x={argument})]")
    assert calls is None or json.loads(calls[0].arguments)


def test_code_is_never_run_and_says_nothing_of_its_escapes() -> None:
    assert read_python_calls("[f(x=__import__('os').getcwd())]") is None
    assert read_python_calls(r"[f(x='\d')]") == [("f", r'{"x": "\\d"}')]


PARAMETERS = {
    "edit": {"properties": {"text": {"type": "string"}, "line": {"type": "integer"}}},
}
EDIT = """\
<tool_call>
<function=edit>
<parameter=text>

 if a < b </p>:
  "x"

</parameter>
<parameter=line>
12
</parameter>
</function>
</tool_call>"""
EDIT_CALL = ("edit", r'{"text": "\n if a < b </p>:\n  \"x\"\n", "line": 12}')
XML = [
    (EDIT, Parsed("", [EDIT_CALL])),
    (f"a\n{EDIT}\n{EDIT} b", Parsed("a b", [EDIT_CALL, EDIT_CALL])),
    (
        "<tool_call><function=edit><parameter=text>12</parameter></function></tool_call>",
        Parsed("", [("edit", '{"text": "12"}')]),
    ),
    (
        "<tool_call><function=f><parameter=a>1x</parameter><parameter=b>NaN</parameter>"
        '<parameter=c>{"d": [1]}</parameter></function></tool_call>',
        Parsed("", [("f", '{"a": "1x", "b": "NaN", "c": {"d": [1]}}')]),
    ),
    ("<tool_call><function=f></function></tool_call>", Parsed("", [("f", "{}")])),
    ("<tool_call><function=f>", Parsed("", [("f", "{")])),
    ("<tool_call><function=f", None),
    ("<tool_call><function=>", None),
    ("<tool_call><fun>", None),
    ("<tool_call><function=edit><parameter=text>a <", Parsed("", [("edit", '{"text": "a <')])),
    ("<tool_call><function=f>x</tool_call> y", Parsed(" y", [("f", "{x")])),
    (
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b\n</tool_call>",
        Parsed("", [("f", '{"a": 1<parameter=b')]),
    ),
]


@pytest.mark.parametrize(("text", "expected"), XML)
def test_calls_in_tags_in_every_cut(text: str, expected: Parsed | None) -> None:
    parsed = parse_every_cut(text, "hermes", parameters=PARAMETERS)
    assert parsed == (expected or Parsed(text, []))
