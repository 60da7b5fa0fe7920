"""Structures that wait to be compiled off the caller's thread, and those that are kept."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from runtime.errors import CapacityError, UnavailableError
from runtime.grammar.compiler import GrammarCompiler, Outcome
from runtime.grammar.matcher import CompiledGrammar
from runtime.structure import Structure
from tests.grammar_compilers import (
    TIMEOUT_S,
    byte_ids,
    compile_one,
    make_compiler,
    walk,
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


def regex(text: str) -> Structure:
    return Structure(kind="regex", text=text)


class Holding:
    """Holds the compiler's thread until the block ends."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._release = threading.Event()

    def __enter__(self) -> None:
        held = threading.Event()

        def hold(_: Outcome) -> None:
            held.set()
            self._release.wait(TIMEOUT_S)

        # A refused one isn't kept, so that it is on the thread each time.
        self._compiler.compile(regex("("), hold)
        assert held.wait(TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self._release.set()


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


def test_requests_of_one_structure_wait_without_a_limit_and_structures_with_one(
    folder: Path,
) -> None:
    compiler = make_compiler(folder, max_pending=3)
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    refused: SimpleQueue[Outcome] = SimpleQueue()
    with Holding(compiler):
        for _ in range(400):
            compiler.compile(regex("same"), outcomes.put)
        for text in ("second", "third", "fourth", "fifth"):
            compiler.compile(regex(text), (refused if text[0] == "f" else outcomes).put)
        compiler.compile(regex("third"), outcomes.put)
        for _ in range(2):
            error = refused.get_nowait()
            assert isinstance(error, CapacityError)
            assert str(error).startswith("3 structures wait to be compiled: max_pending=3;")
        assert outcomes.empty()
    compiled = [outcomes.get(timeout=TIMEOUT_S) for _ in range(403)]
    assert all(isinstance(outcome, CompiledGrammar) for outcome in compiled)
    assert len({*compiled}) == 3
    compiler.close()


def test_what_nobody_wants_any_more_is_not_compiled(compiler, monkeypatch) -> None:
    vetted: list[str] = []
    vet = compiler._vetter.vet
    monkeypatch.setattr(compiler._vetter, "vet", lambda *args: (vetted.append(args[0]), vet(*args)))
    outcomes: dict[str, SimpleQueue[Outcome]] = {"dropped": SimpleQueue(), "kept": SimpleQueue()}
    with Holding(compiler):
        for text, wishes in (("dropped", (False, False)), ("kept", (False, True))):
            for wish in wishes:
                compiler.compile(regex(text), outcomes[text].put, lambda wish=wish: wish)
    for _ in range(2):
        assert isinstance(outcomes["dropped"].get(timeout=TIMEOUT_S), UnavailableError)
        assert isinstance(outcomes["kept"].get(timeout=TIMEOUT_S), CompiledGrammar)
    assert isinstance(compile_one(compiler, "regex", "after"), CompiledGrammar)
    assert not any("dropped" in source for source in vetted)
    assert outcomes["dropped"].empty()
    assert outcomes["kept"].empty()
    assert isinstance(compile_one(compiler, "regex", "dropped"), CompiledGrammar)


def test_who_comes_while_the_others_are_asked_gets_it(compiler) -> None:
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    late: SimpleQueue[Outcome] = SimpleQueue()

    def is_wanted() -> bool:
        compiler.compile(regex("late"), late.put)
        return False

    compiler.compile(regex("late"), outcomes.put, is_wanted)
    assert isinstance(outcomes.get(timeout=TIMEOUT_S), UnavailableError)
    assert isinstance(late.get(timeout=TIMEOUT_S), CompiledGrammar)


def test_closing_while_they_are_asked_answers_once(folder: Path) -> None:
    compiler = make_compiler(folder)
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    closing = threading.Thread(target=compiler.close)

    def is_wanted() -> bool:
        closing.start()
        outcomes.put(answered.get(timeout=TIMEOUT_S))
        return False

    answered: SimpleQueue[Outcome] = SimpleQueue()
    compiler.compile(regex("a"), answered.put, is_wanted)
    assert isinstance(outcomes.get(timeout=TIMEOUT_S), UnavailableError)
    closing.join(TIMEOUT_S)
    assert answered.empty()


def test_a_worn_structure_is_compiled_anew_though_nothing_was_mended(folder: Path) -> None:
    compiler = make_compiler(folder, max_lexer_states=1500, remaking_s=0)
    text = r"(.|\n)*a(.|\n){40}"
    grammar = compile_one(compiler, "regex", text)
    draw = random.Random(5)
    a, b = byte_ids(grammar, "ab")
    errors = [walk(grammar.matcher(), draw.choices([a, b], k=60)) for _ in range(30)]
    assert "too many states" in errors[-1]
    assert grammar.worn
    again = compile_one(compiler, "regex", text)
    assert again is not grammar
    assert walk(again.matcher(), draw.choices([a, b], k=60)) == "None"
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
