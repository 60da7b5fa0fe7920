"""Strings of JSON output: written in one way only, and what can't be written is refused."""

import json
import re

import jsonschema
import pytest

from runtime.errors import InvalidRequestError
from runtime.grammar.json_strings import check_value, writable_pattern
from runtime.grammar.limits import GrammarLimits
from runtime.grammar.matcher import CompiledGrammar
from runtime.grammar.source import write_source
from runtime.grammar.tokenizer import GrammarTokenizer
from runtime.structure import Structure
from tests.byte_vocabulary import ids_of, make_tokenizer

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    return make_tokenizer(GrammarLimits())


def compile_schema(tokenizer: GrammarTokenizer, schema: object) -> CompiledGrammar:
    structure = Structure(kind="json_schema", text=json.dumps(schema))
    return CompiledGrammar(tokenizer, "json_schema", write_source(structure, max_bytes=10_000))


def is_taken(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    matcher.replay(ids_of(text))
    return matcher.is_complete


UNWRITABLE = {*map(chr, range(32)), "\x7f"} - {*"\b\t\n\f\r"}
INTEGERS = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "additionalProperties": INTEGERS,
        },
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "string"}},
            "additionalProperties": INTEGERS,
        },
    ],
)
def test_a_key_does_not_pass_for_another_one(tokenizer, schema):
    grammar = compile_schema(tokenizer, schema)
    assert is_taken(grammar, '{"a": "x", "b": 1}')
    for key in ("a", r"\u0061"):
        assert not is_taken(grammar, f'{{"a": "x", "{key}": 1}}')
        assert not is_taken(grammar, f'{{"{key}": 1}}')


@pytest.mark.parametrize("char", ["\b", "\t", "\n", "\f", "\r", '"', "\\"])
def test_characters_with_a_short_escape_can_be_written(tokenizer, char):
    text = json.dumps(f"a{char}b")
    pattern = f"^a{re.escape(char)}b$" if char != "\b" else r"^a\x08b$"
    for schema in ({}, {"const": json.loads(text)}, {"type": "string", "pattern": pattern}):
        assert is_taken(compile_schema(tokenizer, schema), text)
    named = compile_schema(tokenizer, {"type": "object", "properties": {char: INTEGERS}})
    assert is_taken(named, json.dumps({char: 1}))
    assert not is_taken(named, json.dumps({char: "x"}))


PATTERNS = [
    *(r"\x01", "\x7f", r"\u001f", r"\x{1}", r"\u{1f}", r"\U0000001f", r"\v", r"\a", r"\x0141"),
    *(r"[\x01]", r"[\x01-\x07\x7f]", r"[^\t\n\f\r\x08 -~]", r"[\p{Cc}\x01]", r"(\x01|c)", r"\x7f?"),
    *(r"[^\x22]", r"[^\\]", r"[^\x22\\]", r"[^\n\x22]", r"[^\x00-\x1f]", r"[\x00-\x1f]"),
    *(r"[\x00-\x1f#-\x7f]", r"[\x00-\x7f]", r"[^]]", r"[^-\x22]", r"[^\x22-]", r"[]\]\\]"),
    *(r"\p{Cc}", r"\P{P}", r"\PP", r"[^\p{P}]", r"[\p{Lu}]", r"[^\p{L}\x00-\x1f]"),
    *(
        ".",
        r"\s",
        r"\S",
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"[\s\d]",
        r"[\w-]",
        r"[\D]",
        r"\\\x41",
        r"\|",
    ),
]
PROPERTIES = {  # of ASCII
    r"\p{Cc}": r"\x00-\x1f\x7f",
    r"\p{Lu}": "A-Z",
    r"\p{L}": "A-Za-z",
    r"\p{P}": r"!-#%-*,-/:;?@[-\]_{}",
}


def as_python(pattern: str) -> str:
    pattern = pattern.replace(r"\P{P}", r"[^\p{P}]").replace(r"\PP", r"[^\p{P}]")
    pattern = re.sub(r"\\[xu]\{(\w+)\}", lambda hexadecimal: f"\\x{hexadecimal[1]:0>2}", pattern)
    pattern = r"[\x00-\x1f\x7f]" if pattern == r"\p{Cc}" else pattern
    for text, members in PROPERTIES.items():
        pattern = pattern.replace(text, members)
    return pattern


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_can_be_written_of_it(tokenizer, pattern):
    schema = {"type": "string", "pattern": f"^a{pattern}b$"}
    readable = re.compile(f"a{as_python(pattern)}b", re.ASCII)
    texts = ["ab", *(f"a{chr(code)}b" for code in range(128)), "a\\Ab", "a\x0141b"]
    wanted = {t for t in texts if readable.fullmatch(t) and UNWRITABLE.isdisjoint(t)}
    try:
        grammar = compile_schema(tokenizer, schema)
    except InvalidRequestError:
        assert not wanted
        return
    spellings = {json.dumps(text): text for text in texts}
    spellings |= {json.dumps(text, ensure_ascii=False): text for text in texts}
    taken = {text for spelling, text in spellings.items() if is_taken(grammar, spelling)}
    assert taken == wanted


def test_keys_match_what_can_be_written_of_their_pattern(tokenizer):
    schema = {"patternProperties": {'^[^"]b$': INTEGERS}, "additionalProperties": False}
    grammar = compile_schema(tokenizer, {"type": "object", **schema})
    assert is_taken(grammar, '{"ab": 1, "\\nb": 1}')
    assert not is_taken(grammar, '{"\\"b": 1}')


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"a[\s&&[^\t\n\f\r ]]b", "write it with"),
        (r"a[a--b]", "write it with"),
        (r"a[[]", "write it with"),
        (r"a[b~~c]", "write it with"),
        (r"(?x) a \x { 01 }", "flag x"),
        (r"(?i-mx:a)", "flag x"),
    ],
)
def test_what_no_pattern_of_a_schema_has_is_refused(pattern, reason):
    with pytest.raises(InvalidRequestError, match="pattern") as refused:
        writable_pattern(pattern)
    assert reason in str(refused.value)


@pytest.mark.parametrize("value", ["\x00", ["a\x7f"], {"a": ["b", "\x1f"]}, [{"\x0b": 1}]])
def test_a_value_that_can_not_be_written_is_refused(value):
    with pytest.raises(InvalidRequestError, match="control character"):
        check_value(value)


def test_references_within_the_schema_are_followed(tokenizer):
    schema = {
        "$id": "https://example.com/schema",
        "type": "object",
        "properties": {
            "a/b": {"type": "object", "properties": {"c~d e": INTEGERS}, "required": ["c~d e"]},
            "first": {"$ref": "#/properties/a~1b"},
            "second": {"$ref": "#/properties/a~1b/properties/c~0d%20e"},
            "third": {"anyOf": [{"const": 1}, {"$ref": "#/$defs/yes"}]},
            "self": {"$ref": "#"},
        },
        "$defs": {"yes": True},
        "additionalProperties": False,
    }
    grammar = compile_schema(tokenizer, schema)
    for value in (
        {"first": {"c~d e": 1}, "second": 2, "third": "x"},
        {"self": {"second": 3}},
        {"first": {}},
        {"second": "x"},
        {"self": {"second": "x"}},
    ):
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert is_taken(grammar, json.dumps(value)) == valid
