"""Compiling off the caller's thread: once, within limits, and never silently less."""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from runtime.errors import InvalidRequestError, UnavailableError
from runtime.grammar.compiler import GrammarCompiler, Outcome
from runtime.grammar.limits import GrammarLimits
from runtime.grammar.masks import masks_of
from runtime.grammar.matcher import CompiledGrammar, Matcher
from runtime.grammar.source import write_source
from runtime.grammar.vetter import Vetter
from runtime.structure import Structure, StructureKind
from tests.frontend import make_byte_fallback_tokenizer

pytestmark = pytest.mark.wire

VOCAB_SIZE = 600
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_byte_fallback_tokenizer(["some words"]).save(str(folder / "tokenizer.json"))
    return folder


def make_compiler(folder: Path, **limits: float) -> GrammarCompiler:
    return GrammarCompiler(
        str(folder), vocab_size=VOCAB_SIZE, eos_token_ids=[1], limits=GrammarLimits(**limits)
    )


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(folder)
    yield compiler
    compiler.close()


def compile_one(compiler: GrammarCompiler, kind: StructureKind, text: str) -> Outcome:
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    compiler.compile(Structure(kind=kind, text=text), outcomes.put)
    return outcomes.get(timeout=TIMEOUT_S)


def refusal(compiler: GrammarCompiler, kind: StructureKind, text: str) -> str:
    outcome = compile_one(compiler, kind, text)
    assert isinstance(outcome, InvalidRequestError)
    assert str(outcome).startswith(kind)
    assert len(str(outcome)) < 500
    return str(outcome)


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
    ("grammar", 'start: ((("a" | "b"){1,1000}){1,1000}){1,1000}', "max is 300"),
    ("grammar", chain(60, "R{0}: R{1} R{1}"), "limit for this grammar: 1000000"),
    ("grammar", "start: T\nT: " + " & ".join(f"/.*{i}.*{i + 1}/" for i in range(30)), "fuel"),
    ("choices", json.dumps(["x" * 100] * 700), "at most 65536"),
]


@pytest.mark.parametrize(("kind", "text", "limit"), EXPLODING, ids=lambda value: value[:30])
def test_what_explodes_is_refused_by_its_limit(compiler, kind, text, limit):
    message = refusal(compiler, kind, text)
    assert any(part in message for part in limit.split("|")), message
    assert still_works(compiler)


def walk(matcher: Matcher, token_ids: list[int]) -> str:
    for token_id in token_ids:
        masks_of([matcher])
        matcher.advance(token_id)
    masks_of([matcher])
    return str(matcher.error)


def byte_ids(grammar: CompiledGrammar, text: str) -> list[int]:
    tokenizer = grammar.tokenizer.tokenizer
    single = {tokenizer.decode_bytes([i]): i for i in range(VOCAB_SIZE)}
    return [single[bytes([byte])] for byte in text.encode()]


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


def test_equal_structures_are_compiled_once(compiler, monkeypatch):
    compiled: list[str] = []
    init = CompiledGrammar.__init__

    def count(self: CompiledGrammar, *args: object) -> None:
        compiled.append(str(args))
        init(self, *args)

    monkeypatch.setattr(CompiledGrammar, "__init__", count)
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    for _ in range(3):
        compiler.compile(Structure(kind="regex", text="once[a-z]"), outcomes.put)
    first, *others = [outcomes.get(timeout=TIMEOUT_S) for _ in range(3)]
    caller: list[threading.Thread] = []
    compiler.compile(
        Structure(kind="regex", text="once[a-z]"),
        lambda outcome: caller.append(threading.current_thread()) or outcomes.put(outcome),
    )
    assert caller == [threading.current_thread()], "cached ones are answered at once"
    assert {outcomes.get(), *others} == {first}
    assert len(compiled) == 1


def test_the_cache_forgets_the_longest_unused(folder):
    compiler = make_compiler(folder, max_cached=2)
    first, second = (compile_one(compiler, "regex", text) for text in "ab")
    assert compile_one(compiler, "regex", "a") is first
    compile_one(compiler, "regex", "c")
    assert compile_one(compiler, "regex", "a") is first
    assert compile_one(compiler, "regex", "b") is not second
    compiler.close()


def test_one_sequence_does_not_use_up_the_states_of_another(folder):
    """Random texts make new states of this one for ever; each alone stays within the limit."""
    compiler = make_compiler(folder, max_lexer_states=1500)
    text = r"(.|\n)*a(.|\n){40}"
    grammar = compile_one(compiler, "regex", text)
    draw = random.Random(5)
    a, b = byte_ids(grammar, "ab")
    for _ in range(30):
        assert walk(grammar.matcher(), draw.choices([a, b], k=60)) == "None"
    assert grammar.worn
    again = compile_one(compiler, "regex", text)
    assert again is not grammar
    assert not again.worn
    compiler.close()


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


def test_a_tokenizer_whose_bytes_can_not_be_told_is_refused(tmp_path):
    contents = json.loads(make_byte_fallback_tokenizer(["words"]).to_str())
    contents["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    compiler = make_compiler(tmp_path)
    assert "WordPiece" in refusal(compiler, "regex", "a")
    compiler.close()


def test_closing_answers_all_that_wait_once(folder):
    compiler = make_compiler(folder)
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    held, release = threading.Event(), threading.Event()

    def hold(outcome: Outcome) -> None:
        outcomes.put(outcome)
        held.set()
        release.wait(TIMEOUT_S)

    compiler.compile(Structure(kind="regex", text="first"), hold)
    assert held.wait(TIMEOUT_S)
    for index in range(3):  # behind the one that holds the thread
        compiler.compile(Structure(kind="regex", text=f"x{index}"), outcomes.put)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    answers = [outcomes.get(timeout=TIMEOUT_S) for _ in range(4)]
    release.set()
    closing.join(TIMEOUT_S)
    compiler.close()
    assert isinstance(answers[0], CompiledGrammar)
    assert all(isinstance(answer, UnavailableError) for answer in answers[1:])
    assert outcomes.empty()
    assert isinstance(compile_one(compiler, "regex", "late"), UnavailableError)
