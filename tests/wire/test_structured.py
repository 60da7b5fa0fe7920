"""Structured output in the engine: valid whatever the batch does, and compiled beside it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runtime.grammar.compiler import GrammarCompiler
from runtime.request import FinishReason
from tests.frontend import status_of
from tests.scheduling import EOS, oracle_continuation
from tests.served import serving
from tests.structured import (
    MAX_TOKENS,
    PROMPT,
    TOKENIZER,
    Client,
    HeldCompiler,
    Running,
    make_compiler,
    write_tokenizer,
)
from tests.structures import CHOICES, GRAMMARS, REGEXES, SCHEMAS

pytestmark = pytest.mark.wire

PLAIN = 1000  # ids of requests without a form


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(folder)
    yield compiler
    compiler.close()


@pytest.fixture
def held(compiler: GrammarCompiler) -> HeldCompiler:
    return HeldCompiler(compiler)


def validity_of(params: dict[str, Any], text: str) -> object:
    """Raises where the text isn't of the form, or returns nothing that is true."""
    match params:
        case {"json_schema": schema}:
            jsonschema.Draft202012Validator(json.loads(schema)).validate(json.loads(text))
            return True
        case {"regex": regex}:
            return re.fullmatch(regex, text)
        case {"grammar": grammar}:
            return re.fullmatch(dict(GRAMMARS)[grammar], text)
        case {"choices": choices}:
            return text in choices


EVERY_KIND: list[dict[str, Any]] = [
    *({"json_schema": json.dumps(schema)} for schema in SCHEMAS),
    *({"regex": regex} for regex in REGEXES),
    *({"grammar": grammar} for grammar, _ in GRAMMARS),
    *({"choices": choices} for choices in CHOICES),
]


def run_every_kind(compiler: GrammarCompiler, *, num_blocks: int) -> tuple[Client, int]:
    """A request of one or two choices for each, others without a form between them.

    Returns the client and the number of preemptions.
    """
    with Running(compiler, num_blocks=num_blocks, max_num_seqs=12) as running:
        client = running.client
        for request_id, params in enumerate(EVERY_KIND):
            client.add(request_id, n=1 + request_id % 2, **params)
            client.add(PLAIN + request_id, max_tokens=20)
        client.wait(len(EVERY_KIND) + sum(1 + i % 2 for i in range(len(EVERY_KIND))))
        assert not client.failures
        assert max(running.ranks.num_masked) > 1
        assert not running.engine._structured._matchers, "what has ended is kept"
        return client, running.engine.stats().num_preemptions


def test_outputs_are_valid_and_preemption_changes_none(compiler: GrammarCompiler) -> None:
    client, num_preemptions = run_every_kind(compiler, num_blocks=1024)
    assert num_preemptions == 0
    formed = [key for key in client.reasons if key[0] < PLAIN]
    ended = [key for key in formed if client.reasons[key] is FinishReason.STOP]
    assert len(ended) > 0.8 * len(formed), "cut too often to tell"
    for request_id, choice in ended:
        params = EVERY_KIND[request_id]
        assert validity_of(params, client.text(request_id, choice)), params
    for request_id in range(PLAIN, PLAIN + len(EVERY_KIND)):
        wanted = oracle_continuation(PROMPT, max_tokens=20, seed=request_id)
        assert client.tokens[request_id, 0] == wanted

    squeezed, num_preemptions = run_every_kind(compiler, num_blocks=50)
    assert num_preemptions > 0
    assert squeezed.tokens == client.tokens
    assert squeezed.reasons == client.reasons


def test_choices_of_one_request_go_their_own_ways(compiler: GrammarCompiler) -> None:
    with Running(compiler) as running:
        running.client.add(1, n=6, regex="[a-z]{8}")
        running.client.wait(6)
        texts = {running.client.text(1, choice) for choice in range(6)}
        assert len(texts) > 1
        assert all(re.fullmatch("[a-z]{8}", text) for text in texts)


def test_who_waits_to_be_compiled_holds_no_slot(held: HeldCompiler) -> None:
    with Running(held, max_num_seqs=1) as running:
        client = running.client
        client.add(1, regex="[0-9]{3}")
        for request_id in (2, 3):  # come later and are served before
            client.add(request_id, max_tokens=5)
            client.wait()
            assert list(client.reasons)[-1] == (request_id, 0)
        stats = running.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        held.release()
        client.wait()
        assert re.fullmatch("[0-9]{3}", client.text(1))


def test_an_abort_while_it_is_compiled(held: HeldCompiler) -> None:
    with Running(held) as running:
        client = running.client
        client.add(1, regex="a+", n=2)
        client.connection.abort(1)
        client.add(1, max_tokens=3)  # the id is free again
        client.wait()
        held.release()
        running.settle()
        assert client.tokens[1, 0] == oracle_continuation(PROMPT, max_tokens=3, seed=1)
        assert not client.failures
        assert running.engine.stats().num_running == 0
        assert not running.engine._structured._matchers


@pytest.mark.parametrize("aborted", [0, 1, 2])
@pytest.mark.parametrize("regex", ["[a-c]{4}", "("])
def test_an_abort_of_one_choice_while_it_is_compiled(
    held: HeldCompiler, aborted: int, regex: str
) -> None:
    with Running(held) as running:
        client = running.client
        client.add(1, regex=regex, n=3)
        client.connection.abort(1, aborted)
        running.settle()
        held.release()
        if regex == "(":  # those that are left are told
            client.wait()
            assert str(client.failures[1]).startswith("regex is refused: ")
            return
        client.wait(2)
        others = {0, 1, 2} - {aborted}
        assert {key for key in client.reasons if key[0] == 1} == {(1, choice) for choice in others}
        assert all(re.fullmatch(regex, client.text(1, choice)) for choice in others)


def test_an_abort_while_it_is_generated(compiler: GrammarCompiler) -> None:
    with Running(compiler, num_blocks=1024) as running:
        client = running.client
        for request_id in (1, 2):
            client.add(request_id, regex="[ab]{1500}c", n=2, max_tokens=1900)
        while len(client.tokens[1, 1]) < 3 or len(client.tokens[2, 0]) < 3:
            running.settle()
            del client.tokens[99, 0], client.reasons[99, 0]
        client.connection.abort(1)
        client.connection.abort(2, 1)
        running.settle()
        assert len(running.engine._structured._matchers) <= 1
        client.connection.abort(2)
        del client.tokens[99, 0], client.reasons[99, 0]
        running.settle()
        assert not client.failures
        assert not running.engine._structured._matchers


def test_over_grpc(folder: Path, compiler: GrammarCompiler) -> None:
    with (
        Running(compiler, path=str(folder)) as running,
        serving(running.engine) as client,
    ):
        schema = '{"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 3}'
        calls = [
            client.generate(token_ids=PROMPT, json_schema=schema, max_tokens=MAX_TOKENS)
            for _ in range(4)
        ]
        for call in calls:
            value = json.loads("".join(response.text for response in call))
            jsonschema.Draft202012Validator(json.loads(schema)).validate(value)
        code, details = status_of(client.generate(token_ids=PROMPT, regex="("))
        assert code.name == "INVALID_ARGUMENT"
        assert details.startswith("regex is refused: ")
        assert TOKENIZER.decode([EOS]) == ""
