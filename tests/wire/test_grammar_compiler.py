"""Compiling within limits, and never silently less."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import InvalidRequestError
from runtime.grammar.compiler import GrammarCompiler
from runtime.grammar.limits import GrammarLimits
from runtime.grammar.masks import masks_of
from runtime.grammar.matcher import CompiledGrammar
from runtime.grammar.source import write_source
from runtime.grammar.vetter import Vetter
from runtime.grammar.vocabulary import Vocabulary
from runtime.structure import Structure, StructureKind
from tests.frontend import make_byte_fallback_tokenizer
from tests.grammar_compilers import (
    byte_ids,
    compile_one,
    make_compiler,
    refusal,
    write_tokenizer,
)

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(folder)
    yield compiler
    compiler.close()


def still_works(compiler: GrammarCompiler) -> bool:
    return isinstance(compile_one(compiler, "regex", "still[0-9]"), CompiledGrammar)


def nested(depth: int, width: int) -> dict[str, object]:
    inner = nested(depth - 1, width) if depth else {"type": "string"}
    return {"type": "object", "properties": {f"p{index}": inner for index in range(width)}}


def chain(length: int, link: str) -> str:
    links = (link.format(index, index + 1) for index in range(length))
    return "\n".join(["start: R0", *links, f'R{length}: "a"'])


OPTIONS = [
    {"anyOf": [{"properties": {f"a{i}": {"minLength": i}}}, {"properties": {f"a{i}": {}}}]}
    for i in range(20)
]
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
ODD_MULTIPLE = {"type": "integer", "multipleOf": 1000003, "minimum": 17, "maximum": 10**15}

EXPLODING: list[tuple[StructureKind, str, str]] = [
    ("regex", "a" * 65_537, "65537 bytes must be at most 65536"),
    ("json_schema", json.dumps({"enum": [f"value-{i}" for i in range(9000)]}), "at most 65536"),
    ("regex", "(" * 20_000 + "a" + ")" * 20_000, "nest"),
    ("json_schema", '{"items":' * 1500 + "{}" + "}" * 1500, "no JSON|recursion"),
    ("json_schema", '{"items":' * 400 + "{}" + "}" * 400, "recursion"),
    ("json_schema", json.dumps({"allOf": OPTIONS}), "too large"),
    ("json_schema", json.dumps(nested(4, 6)), "too large|at most 65536"),
    ("json_schema", json.dumps(WIDE), "max is 1000|limit 10000"),
    ("json_schema", json.dumps(ODD_MULTIPLE), "fuel exhausted"),
    (
        "json_schema",
        json.dumps({"minLength": 5000, "maxLength": 10_000, "pattern": "^(a|b)*a(a|b){50}$"}),
        "Unable to determine if regex is empty",
    ),
    ("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "too deeply nested"),
    ("grammar", chain(4000, "R{0}: R{1}"), "nests too deep for a stack of 1048576 bytes"),
    ("grammar", chain(3000, 'R{0}: R{1} "x"'), "nests too deep for a stack"),
    ("grammar", 'start: ((("a" | "b"){1,1000}){1,1000}){1,1000}', "max is 150"),
    ("grammar", chain(60, "R{0}: R{1} R{1}"), "limit for this grammar: 1000000|takes more than"),
    ("grammar", "start: T\nT: " + " & ".join(f"/.*{i}.*{i + 1}/" for i in range(30)), "fuel"),
    ("choices", json.dumps(["x" * 100] * 700), "at most 65536"),
]


@pytest.mark.parametrize(("kind", "text", "limit"), EXPLODING, ids=lambda value: value[:30])
def test_what_explodes_is_refused_by_its_limit(compiler, kind, text, limit):
    message = refusal(compiler, kind, text)
    assert any(part in message for part in limit.split("|")), message
    assert still_works(compiler)


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        ("regex", "((a{1,1000}){1,1000})", "a" * 100),
        ("grammar", "start: a\na: /[ab]/ a | /[ab]/", "ab" * 300),
    ],
)
def test_what_explodes_while_decoding_ends_alone(compiler, kind, text, output):
    grammar = compile_one(compiler, kind, text)
    healthy = compile_one(compiler, "regex", "[ab]+").matcher()
    exploding, token_ids = grammar.matcher(), byte_ids(grammar, output)
    for token_id in token_ids:
        masks = masks_of([exploding, healthy])
        if exploding.error is not None:
            break
        exploding.advance(token_id)
        healthy.advance(token_id)
    assert masks.num_words.tolist() == [0, masks.num_words[1]]
    assert masks.num_words[1] > 0
    assert healthy.error is None
    assert isinstance(exploding.error, InvalidRequestError)
    assert str(exploding.error).startswith(f"{kind}: after ")
    assert not exploding.is_finished
    mate = grammar.matcher()  # of the same structure, at its start
    assert masks_of([mate]).num_words[0] > 0
    assert mate.error is None


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "strin', "no JSON"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", '{"not": {}}', '"not"'),
        ("json_schema", '{"properties": {"a": {"uniqueItems": true}}}', '"uniqueItems"'),
        ("json_schema", '{"properties": {"a": {"maxLenght": 3}}}', "#/properties/a: keyword"),
        ("json_schema", '{"anyOf": [{"nullable": true}]}', "#/anyOf/0: keyword 'nullable'"),
        ("json_schema", '{"x-guidance": {"lenient": true}}', "'x-guidance'"),
        ("json_schema", '{"format": "phone"}', "phone"),
        ("json_schema", '{"items": [{}]}', "use prefixItems"),
        ("json_schema", '{"exclusiveMinimum": true}', "must be a number"),
        ("json_schema", '{"minProperties": 2}', "minProperties=2 must be at most 1"),
        ("json_schema", '{"$ref": "https://example.com/a.json"}', "https://example.com/a.json"),
        ("json_schema", '{"$ref": "file:///etc/hosts"}', "file:///etc/hosts"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "none"),
        ("json_schema", '{"$ref": "#/examples/0", "examples": [{"maxLenght": 2}]}', "#/examples/0"),
        ("json_schema", '{"$ref": "#/default", "default": {"maxLenght": 2}}', "#/default"),
        ("json_schema", '{"$ref": "#/%64efault", "default": {"maxLenght": 2}}', "#/%64efault"),
        ("json_schema", '{"$ref": "#/anyOf", "anyOf": [{"type": "null"}]}', "#/anyOf"),
        ("json_schema", '{"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}', "#name"),
        ("json_schema", '{"$ref": 3}', "$ref='3'"),
        ("json_schema", '{"$defs": {"a": {"$id": "b", "$ref": "#"}}}', "#/$defs/a: $id"),
        ("json_schema", '{"const": "a\\u0001b"}', "has a control character"),
        ("json_schema", '{"enum": ["a", {"b": ["\\u007f"]}]}', "has a control character"),
        ("json_schema", '{"properties": {"a\\u001fb": {}}}', "has a control character"),
        ("json_schema", '{"required": ["a\\u007fb"]}', "has a control character"),
        ("json_schema", r'{"type": "string", "pattern": "^a\\x01$"}', "Unsatisfiable"),
        ("json_schema", '{"items": {"pattern": "[a--z]"}}', "#/items: pattern: '[a--z]' has one"),
        ("json_schema", '{"pattern": "a(?=b)"}', "look-ahead"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "minimum"),
        ("json_schema", '{"oneOf": [{"minimum": 1}, {"minimum": 2}]}', "oneOf"),
        ("regex", "a(", "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", r"a\b", "lookarounds"),
        ("grammar", 'begin: "a"', "start"),
        ("grammar", 'root ::= "a"', "GBNF"),
        ("grammar", "start: other", "other"),
        ("grammar", 'start: "a"\n%llguidance {"no_forcing": false}', "line 2: '%llguidance'"),
        ("grammar", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}', "'%json'"),
        ("grammar", "start: <[0-600]>", "<[0-600]>"),
        ("grammar", 'start: "a" <eos>', "<eos>"),
        ("grammar", "start: /(?x)a #[/ <[105]> /]/", "<[105]>"),
        ("grammar", 'start: /a[/]b/ "c"', "lexer error"),
        ("grammar", "start: @other", "@other"),
        ("grammar", 'start: a\na[stop="x"]: /.*/', "stop="),
        ("grammar", "start: a\na[max_tokens=3]: /.*/", "max_tokens="),
        ("choices", "a, b", "no JSON list"),
        ("choices", "[]", "at least one"),
        ("choices", '["a", 3]', "choices[1]=3"),
        ("choices", '["a", ""]', "choices[1]=''"),
        ("choices", '["\\ud800"]', "surrogate"),
        ("regex", "\ud800", "surrogate"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(compiler, kind, text, reason):
    assert reason in refusal(compiler, kind, text)


def test_a_helper_that_ended_meanwhile_is_replaced():
    vetter = Vetter(GrammarLimits())
    source = write_source(Structure(kind="regex", text="a"), max_bytes=10)
    vetter.vet(source, "regex")
    vetter._process.kill()
    vetter._process.wait()
    vetter.vet(source, "regex")
    vetter.close()


def test_a_slow_one_is_refused_by_time(folder):
    compiler = make_compiler(folder, timeout_s=1e-6)
    assert "more than 1e-06 s" in refusal(compiler, "regex", "a+")
    compiler.close()


def test_a_big_one_is_refused_by_memory(folder):
    """With as much work allowed as it wants."""
    compiler = make_compiler(
        folder,
        max_memory_bytes=2**28,
        initial_lexer_fuel=2**60,
        max_grammar_size=2**60,
        timeout_s=60,
    )
    grammar = "start: " + " ".join(f"r{i}{{1,100000}}" for i in range(1500))
    grammar += "\n" + "\n".join(f'r{i}: "a" | "b"' for i in range(1500))
    assert "more than 268435456 bytes" in refusal(compiler, "grammar", grammar)
    compiler.close()


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_a_model_without_a_tokenizer_refuses_by_name(tmp_path, kind):
    compiler = make_compiler(tmp_path)
    assert "the model has no tokenizer.json" in refusal(compiler, kind, "{}")
    compiler.close()


@pytest.mark.parametrize(
    "contents",
    [b"{", b"[]", b'{"model": 3}', b'{"decoder": null, "model": {"vocab": {"a": -700}}}'],
)
def test_a_tokenizer_file_of_any_contents_leaves_nobody_waiting(tmp_path, contents):
    (tmp_path / "tokenizer.json").write_bytes(contents)
    compiler = make_compiler(tmp_path)
    message = refusal(compiler, "regex", "a")
    assert "tokenizer" in message
    assert str(tmp_path) not in message
    compiler.close()


def test_a_bug_in_reading_the_tokenizer_is_told_to_who_waits(folder, monkeypatch):
    def read(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(Vocabulary, "read", read)
    compiler = make_compiler(folder)
    assert "can't be used: ZeroDivisionError" in refusal(compiler, "regex", "a")
    compiler.close()


def test_a_tokenizer_whose_bytes_can_not_be_told_is_refused(tmp_path):
    contents = json.loads(make_byte_fallback_tokenizer(["words"]).to_str())
    contents["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    compiler = make_compiler(tmp_path)
    assert "WordPiece" in refusal(compiler, "regex", "a")
    compiler.close()
