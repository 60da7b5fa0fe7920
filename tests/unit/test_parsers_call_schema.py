"""The schema that forces calls: what a grammar of it takes, and what can't be forced."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from runtime.errors import InvalidRequestError
from runtime.frontend.parsers.call_schema import call_schema
from runtime.grammar.limits import GrammarLimits
from runtime.grammar.matcher import CompiledGrammar
from runtime.grammar.source import write_source
from runtime.grammar.tokenizer import GrammarTokenizer
from runtime.structure import Structure
from tests.byte_vocabulary import ids_of, make_tokenizer
from tests.parsing import parse, put_together

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    return make_tokenizer(GrammarLimits())


def tool(name: str, parameters: object = None, **more: object) -> dict[str, Any]:
    function = {"name": name, "description": "It does.", "strict": True} | more
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def takes(
    tokenizer: GrammarTokenizer,
    tools: list[dict[str, Any]],
    output: object,
    *,
    name: str | None = None,
    parallel: bool = False,
) -> bool:
    """Whether a model may write `output`."""
    text = call_schema(tools, name=name, parallel=parallel)
    structure = Structure(kind="json_schema", text=text)
    grammar = CompiledGrammar(tokenizer, "json_schema", write_source(structure, max_bytes=10_000))
    matcher = grammar.matcher()
    matcher.replay(ids_of(json.dumps(output)))
    return matcher.is_complete


def call(name: str, **arguments: object) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


LOOK = tool(
    "look",
    {
        "$id": "urn:look",
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"far": {"type": "boolean"}, "at": {"type": "string"}},
        "required": ["far"],
        "additionalProperties": False,
    },
)
WAIT = tool("wait")
TREE = tool(
    "tree",
    {
        "properties": {
            "node": {"$ref": "#/$defs/node"},
            "$ref": {"const": {"$ref": "#/a"}},
            "again": {"$ref": "#"},
        },
        "required": ["node"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}]
            }
        },
    },
)


def test_one_call_of_any_tool(tokenizer: GrammarTokenizer) -> None:
    tools = [LOOK, WAIT]
    assert takes(tokenizer, tools, call("look", far=True, at="x"))
    assert takes(tokenizer, tools, call("wait"))
    for wrong in (
        call("look"),
        call("look", far=1),
        call("wait", far=True),
        call("other"),
        [call("wait")],
        {"name": "wait"},
        {"arguments": {}, "name": "wait"},
    ):
        assert not takes(tokenizer, tools, wrong), wrong


def test_a_call_of_the_named_tool(tokenizer: GrammarTokenizer) -> None:
    assert takes(tokenizer, [LOOK, WAIT], call("wait"), name="wait")
    assert not takes(tokenizer, [LOOK, WAIT], call("look", far=True), name="wait")


def test_calls_in_parallel_are_one_or_more(tokenizer: GrammarTokenizer) -> None:
    tools, calls = [LOOK, WAIT], [call("wait"), call("look", far=False), call("wait")]
    assert takes(tokenizer, tools, calls, parallel=True)
    assert takes(tokenizer, tools, calls[:1], parallel=True)
    assert not takes(tokenizer, tools, [], parallel=True)
    assert not takes(tokenizer, tools, calls[0], parallel=True)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("tools", [[TREE], [WAIT, TREE]])
def test_references_inside_of_parameters_keep_their_target(
    tokenizer: GrammarTokenizer, tools: list[dict[str, Any]], parallel: bool
) -> None:
    def is_taken(**arguments: object) -> bool:
        output = call("tree", **arguments)
        return takes(tokenizer, tools, [output] if parallel else output, parallel=parallel)

    assert is_taken(node=[1, [2, []]])
    assert not is_taken(node=["x"])
    assert is_taken(node=1, **{"$ref": {"$ref": "#/a"}, "again": {"node": 2}})
    assert not is_taken(node=1, again={})


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"properties": {}, "required": []}]
)
def test_without_parameters_arguments_are_empty(
    tokenizer: GrammarTokenizer, parameters: object
) -> None:
    assert takes(tokenizer, [tool("f", parameters)], call("f"))
    assert not takes(tokenizer, [tool("f", parameters)], call("f", a=1))


def test_arguments_are_objects_even_where_the_schema_allows_more(
    tokenizer: GrammarTokenizer,
) -> None:
    tools = [tool("f", {"anyOf": [{"properties": {"a": {"type": "integer"}}}]})]
    assert takes(tokenizer, tools, call("f", a=1))
    assert not takes(tokenizer, tools, {"name": "f", "arguments": 3})


def test_the_tools_stay_as_they_are() -> None:
    before = json.dumps([LOOK, TREE])
    tools = json.loads(before)
    call_schema(tools, name=None, parallel=True)
    assert json.dumps(tools) == before


def test_a_function_without_a_wrapper_is_one_too() -> None:
    assert '"const": "f"' in call_schema([{"name": "f"}], name=None, parallel=False)


def test_what_is_forced_is_parsed() -> None:
    output = json.dumps([call("look", far=True), call("wait")])
    assert put_together(parse([*output], "enforced")).calls == [
        ("look", '{"far": true}'),
        ("wait", "{}"),
    ]


@pytest.mark.parametrize(
    ("tools", "name", "message"),
    [
        ([], None, "tools is empty"),
        ([LOOK], "wait", r"tool_choice names 'wait': .* tools, which has look"),
        ([{"function": 3}], None, r"tools\[0\]\.function is of type int: must be an object"),
        ([LOOK, tool("")], None, r"tools\[1\]\.function\.name='' must be a text, not empty"),
        ([tool("f", 3)], None, r"tools\[0\]\.function\.parameters is of type int"),
        ([tool("f", {"type": "array"})], None, r"parameters\.type='array' must be 'object'"),
        (
            [LOOK, tool("f", {"properties": {"a": {"maxLenght": 3}}})],
            None,
            r"tools\[1\]\.function\.parameters: .*#/properties/a: keyword 'maxLenght'",
        ),
        (
            [tool("f", {"properties": {"a": {"$ref": "other.json"}}})],
            None,
            r"tools\[0\]\.function\.parameters: .*\$ref='other.json' must be # or point",
        ),
        ([tool("f", {"const": object()})], None, r"parameters is no JSON: .*object"),
    ],
)
def test_what_can_not_be_forced_is_refused_by_its_field(
    tools: list[Mapping[str, Any]], name: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        call_schema(tools, name=name, parallel=False)


OPEN = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}


@pytest.mark.parametrize(
    ("parameters", "takes_more"),
    [
        (OPEN, False),
        (OPEN | {"additionalProperties": True}, True),
        (OPEN | {"allOf": [{"type": "object"}]}, True),
    ],
)
def test_a_call_names_what_its_function_does_unless_the_schema_says_more(
    tokenizer: GrammarTokenizer, parameters: dict[str, Any], takes_more: bool
) -> None:
    tools = [tool("look", parameters)]
    assert takes(tokenizer, tools, call("look", far=True))
    assert takes(tokenizer, tools, call("look", far=True, more=1)) == takes_more
