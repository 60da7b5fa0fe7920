"""What a request gets is a function of it alone: not of batch, row, chunks, cache or ranks."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from runtime.grammar.compiler import GrammarCompiler
from runtime.sampling_params import SamplingParams, fork_seed
from tests.asks import EOS, KINDS, VOCAB_SIZE, batch_mates, save_model
from tests.local_ranks import Rank, load_ranks
from tests.quick import quick
from tests.tiny_engine import Answer, Ask, TinyEngine, WaitingCompiler, check_equal

pytestmark = pytest.mark.cpu


FAMILIES = quick(["llama", "gemma3"], "llama")
CHANGES = {"llama": {}, "gemma3": {"tie_word_embeddings": False}}  # tied, it repeats itself
# Eight sequences don't fit; gemma3's windows let go of so many blocks that the test has to help.
PRESSURE = {"llama": {"num_blocks": 50}, "gemma3": {"preempt_every": 2}}

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    family = request.param
    return save_model(tmp_path_factory.mktemp("models") / family, family, **CHANGES[family])


@pytest.fixture(scope="module")
def ranks(folder) -> Iterator[list[Rank]]:
    with load_ranks(folder) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks(folder) -> Iterator[list[Rank]]:
    with load_ranks(folder, tp=2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def compiler(folder) -> Iterator[WaitingCompiler]:
    compiler = GrammarCompiler(str(folder), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield WaitingCompiler(compiler)
    compiler.close()


@pytest.fixture(scope="module")
def alone(ranks, compiler) -> dict[str, list[Answer]]:
    """What each kind gets in an engine of its own."""
    return {kind: TinyEngine(ranks, compiler=compiler).run(ask)[0] for kind, ask in KINDS.items()}


@pytest.mark.parametrize(
    ("place", "kind"),
    quick(
        product([0, 3, 7], KINDS),
        *((3, kind) for kind in ("temperature", "everything", "n", "structured", "ends")),
    ),
)
def test_in_a_batch_at_any_place(ranks, compiler, alone, kind, place) -> None:
    served = TinyEngine(ranks, compiler=compiler)
    asks = batch_mates(seed=place)
    asks.insert(place, KINDS[kind])

    check_equal(served.run(*asks)[place], alone[kind])

    assert served.most_together >= 8
    assert not served.failures


def run_preempted(served: TinyEngine, kind: str, *, seed: int) -> list[Answer]:
    """In a batch under pressure, and at the latest after its fourth token."""
    mates = [served.add(each) for each in batch_mates(seed)]
    number = served.add(KINDS[kind])
    while len(served.answers[number, 0].token_ids) < 4:
        served.step()
    served.preempt(number)
    served.run()
    assert any(who == number and count > 0 for who, count in served.preempted)
    assert all(served.answers[mate, 0].finish_reason for mate in mates)
    return [served.answers[number, choice] for choice in range(KINDS[kind].params.n)]


@pytest.mark.parametrize("kind", quick(KINDS, "everything", "n"))
def test_after_a_preemption(ranks, folder, compiler, alone, kind) -> None:
    served = TinyEngine(ranks, compiler=compiler, **PRESSURE[folder.name])
    check_equal(run_preempted(served, kind, seed=1), alone[kind])


@pytest.mark.full
@every_kind
@pytest.mark.parametrize("chunk", [1, 5])
def test_in_chunks(ranks, compiler, alone, kind, chunk) -> None:
    served = TinyEngine(ranks, compiler=compiler, long_prefill_token_threshold=chunk)

    check_equal(served.run(KINDS[kind])[0], alone[kind])

    assert max(plan.query_lens.max() for plan in served.executor.plans) == chunk


@pytest.mark.full
@every_kind
def test_on_two_ranks(two_ranks, compiler, alone, kind) -> None:
    check_equal(TinyEngine(two_ranks, compiler=compiler).run(KINDS[kind])[0], alone[kind])


@pytest.mark.full
@every_kind
def test_on_two_ranks_in_a_batch_after_a_preemption(
    two_ranks, folder, compiler, alone, kind
) -> None:
    served = TinyEngine(two_ranks, compiler=compiler, **PRESSURE[folder.name])
    check_equal(run_preempted(served, kind, seed=2), alone[kind])


@pytest.mark.parametrize("shift", quick([0, 1, 4, 6], 0))
def test_all_kinds_together_on_two_ranks(two_ranks, folder, compiler, alone, shift) -> None:
    """In small chunks and a small pool, in any order."""
    served = TinyEngine(
        two_ranks,
        compiler=compiler,
        long_prefill_token_threshold=7,
        **PRESSURE[folder.name],
    )
    kinds = [*KINDS][shift:] + [*KINDS][:shift]

    together = served.run(*(KINDS[kind] for kind in kinds))

    for kind, answers in zip(kinds, together, strict=True):
        check_equal(answers, alone[kind])
    assert served.preempted


def test_all_kinds_with_cached_prefixes(ranks, compiler, alone) -> None:
    served = TinyEngine(ranks, compiler=compiler)
    served.run(*(ask.with_seed(5) for ask in KINDS.values()))

    together = served.run(*KINDS.values())

    for kind, answers in zip(KINDS, together, strict=True):
        check_equal(answers, alone[kind])
        assert answers[0].num_cached_tokens >= 28


def test_the_kinds_do_what_they_are_for(alone) -> None:
    """Else the comparisons above would show little."""
    assert all(len(set(answer.token_ids)) > 5 for kind in alone for answer in alone[kind])
    assert len({tuple(each.token_ids) for each in alone["n"]}) == 3
    everything, structured, ends = (alone[k][0] for k in ("everything", "structured", "ends"))
    assert 7 in everything.token_ids
    assert 8 not in everything.token_ids
    assert structured.token_ids[-1] == EOS
    assert 9 < len(ends.token_ids) < 24


def test_another_seed_gives_another_text(ranks, compiler, alone) -> None:
    others = TinyEngine(ranks, compiler=compiler).run(
        *(each.with_seed(6) for each in KINDS.values())
    )
    for kind, answers in zip(KINDS, others, strict=True):
        assert answers[0].token_ids != alone[kind][0].token_ids


def test_each_choice_is_a_request_with_its_seed(ranks, alone) -> None:
    ask = KINDS["n"]
    single = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.5, logprobs=2)
    for index, answer in enumerate(alone["n"]):
        request = Ask(prompt=ask.prompt, params=single, seed=fork_seed(ask.seed, index))
        check_equal(TinyEngine(ranks).run(request)[0], [answer])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_mates_of_a_permuted_batch_get_the_same(ranks, compiler, seed) -> None:
    asks = batch_mates(seed)
    forward = TinyEngine(ranks, compiler=compiler).run(*asks)
    backward = TinyEngine(ranks, compiler=compiler).run(*reversed(asks))
    for one, other in zip(forward, reversed(backward), strict=True):
        check_equal(one, other)
