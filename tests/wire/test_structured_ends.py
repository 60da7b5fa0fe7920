"""What ends structured output before its time, and who is told what."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import CapacityError, DeadlineError, InvalidRequestError, UnavailableError
from runtime.grammar.compiler import GrammarCompiler
from runtime.scheduling.limits import QueueLimits
from tests.scheduling import oracle_continuation
from tests.structured import (
    PROMPT,
    HeldCompiler,
    Running,
    make_compiler,
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


@pytest.fixture
def held(compiler: GrammarCompiler) -> HeldCompiler:
    return HeldCompiler(compiler)


def test_a_refused_structure_hurts_no_other(compiler: GrammarCompiler) -> None:
    with Running(compiler) as running:
        client = running.client
        client.add(1, max_tokens=40)
        client.add(2, json_schema='{"type": "integer", "maxLenght": 3}')
        client.add(3, regex="x{3}")
        client.add(4, grammar="begin: 1", n=5)
        client.wait(4)
        assert sorted(client.failures) == [2, 4]
        assert all(isinstance(error, InvalidRequestError) for error in client.failures.values())
        assert "keyword 'maxLenght' isn't supported" in str(client.failures[2])
        assert str(client.failures[4]).startswith("grammar is refused: ")
        assert client.text(3) == "xxx"
        assert client.tokens[1, 0] == oracle_continuation(PROMPT, max_tokens=40, seed=1)


def test_a_full_queue_and_a_late_client_are_told_once_it_is_compiled(held: HeldCompiler) -> None:
    queue = QueueLimits(max_queued_requests=2)
    with Running(held, queue=queue, max_num_seqs=1, num_blocks=1024) as running:
        client = running.client
        client.add(1, regex="a{3}", n=3)
        client.add(2, regex="b{3}", timeout_s=0.0)
        for request_id in (3, 4, 5):  # one runs and two wait
            client.add(request_id, max_tokens=1900, ignore_eos=True)
        held.release()
        client.wait()
        assert isinstance(client.failures[1], CapacityError)
        for request_id in (3, 4, 5):
            client.connection.abort(request_id)
        held.release()
        client.wait()
        assert isinstance(client.failures[2], DeadlineError)
        assert not running.engine._structured._matchers
        assert running.engine.stats().num_refused == 1


def test_the_engine_stops_while_it_is_compiled(held: HeldCompiler) -> None:
    with Running(held) as running:
        client = running.client
        client.add(1, regex="a+", n=2)
        client.add(2, max_tokens=3)
        client.wait()
        running.engine.stop()
        client.wait()
        assert isinstance(client.failures[1], UnavailableError)
        assert str(client.failures[1]) == "the engine is stopping"
        held.release()  # told to an engine that has ended
        client.add(3, regex="b+")
        client.wait()
        assert list(client.failures) == [1, 3]


def test_a_compiler_that_is_closed_under_it(folder: Path) -> None:
    compiler = make_compiler(folder)
    compiler.close()
    with Running(compiler) as running:
        running.client.add(1, regex="a+")
        running.client.wait()
        assert isinstance(running.client.failures[1], UnavailableError)


def test_a_model_without_a_tokenizer_refuses_by_name(tmp_path: Path) -> None:
    compiler = make_compiler(tmp_path)
    with Running(compiler) as running:
        running.client.add(1, choices=("a", "b"))
        running.client.add(2, max_tokens=3)
        running.client.wait(2)
        assert str(running.client.failures[1]).startswith("choices isn't possible: ")
        assert "no tokenizer.json" in str(running.client.failures[1])
        assert (2, 0) in running.client.reasons
    compiler.close()


def test_a_model_without_an_end_token_refuses_by_name(compiler: GrammarCompiler) -> None:
    with Running(compiler, model={"eos_token_ids": ()}) as running:
        running.client.add(1, json_schema="{}")
        running.client.wait()
        assert str(running.client.failures[1]) == (
            "json_schema is set, and the model has no end-of-sequence token with which a complete "
            "output could end"
        )


@pytest.mark.parametrize("n", [1, 3])
def test_a_rank_that_samples_what_is_not_allowed(compiler: GrammarCompiler, n: int) -> None:
    with Running(compiler) as running:
        running.ranks.disobedient = {2}
        client = running.client
        client.add(1, regex="[a-c]{9}")
        client.wait()  # so that it is sequence 1
        client.add(2, regex="[a-c]{9}", n=n)
        client.add(3, regex="[a-c]{9}", n=2)
        client.wait(3)
        assert str(client.failures[2]).startswith("regex: after 0 tokens: ")
        for key in ((1, 0), (3, 0), (3, 1)):
            assert re.fullmatch("[a-c]{9}", client.text(*key))
        assert not running.engine._structured._matchers


@pytest.mark.parametrize(
    ("params", "limits", "num_empty"),
    [
        (  # met with a token
            {"grammar": "start: a\na: /[ab]/ a | /[ab]/"},
            {"max_items_in_grammar_row": 20},
            0,
        ),
        # Met when a mask is made: then nothing is allowed, but what is told is the limit.
        # Without states of its own it ends at the first limit, wherever the clock would let it go.
        ({"regex": "((a{1,1000}){1,1000})"}, {"remaking_s": 0.0}, 1),
    ],
)
def test_a_limit_of_a_step_is_told_and_ends_its_request_alone(
    folder: Path, params: dict[str, str], limits: dict[str, float], num_empty: int
) -> None:
    compiler = make_compiler(folder, **limits)
    with Running(compiler, num_blocks=1024) as running:
        running.ranks.ends_soon = False
        client = running.client
        client.add(1, max_tokens=1900, **params)
        client.add(2, regex="[a-c]{9}")
        client.wait(2)
        (kind,) = params
        # A token with which it is met isn't taken, but its client has it by then.
        num_taken = len(client.tokens[1, 0]) - (0 if num_empty else 1)
        assert num_taken > 0
        assert str(client.failures[1]).startswith(f"{kind}: after {num_taken} tokens: ")
        assert re.fullmatch("[a-c]{9}", client.text(2))
        # With two steps in flight it is told before the step has run that the mask was made for.
        running.settle()
        assert running.ranks.num_empty == num_empty
        assert running.engine.stats().num_empty_supports == 0
    compiler.close()
