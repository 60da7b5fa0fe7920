"""Compilers of a tiny vocabulary, and what they answer."""

from pathlib import Path
from queue import SimpleQueue

from runtime.errors import InvalidRequestError
from runtime.grammar.compiler import GrammarCompiler, Outcome
from runtime.grammar.limits import GrammarLimits
from runtime.grammar.masks import masks_of
from runtime.grammar.matcher import CompiledGrammar, Matcher
from runtime.structure import Structure, StructureKind
from tests.frontend import make_byte_fallback_tokenizer

VOCAB_SIZE = 600
TIMEOUT_S = 30


def write_tokenizer(folder: Path) -> Path:
    make_byte_fallback_tokenizer(["some words"]).save(str(folder / "tokenizer.json"))
    return folder


def make_compiler(folder: Path, **limits: float) -> GrammarCompiler:
    return GrammarCompiler(
        str(folder), vocab_size=VOCAB_SIZE, eos_token_ids=[1], limits=GrammarLimits(**limits)
    )


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


def walk(matcher: Matcher, token_ids: list[int]) -> str:
    """Its error after these tokens, with a mask before each."""
    for token_id in token_ids:
        masks_of([matcher])
        matcher.advance(token_id)
    masks_of([matcher])
    return str(matcher.error)


def byte_ids(grammar: CompiledGrammar, text: str) -> list[int]:
    tokenizer = grammar.tokenizer.tokenizer
    single = {tokenizer.decode_bytes([i]): i for i in range(VOCAB_SIZE)}
    return [single[bytes([byte])] for byte in text.encode()]
