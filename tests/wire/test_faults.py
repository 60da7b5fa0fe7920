"""Rows that can't be sampled end their request alone, in every batch and at every moment."""

from collections.abc import Iterator

import grpc
import pytest

from protos import common_pb2
from runtime.engine import Engine
from runtime.errors import InvalidRequestError, ModelOutputError
from runtime.request import FinishReason
from runtime.sampling_params import fork_seed
from runtime.scheduling.cache_layout import CacheLayout
from runtime.scheduling.step_plan import Fault, StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from tests.frontend import Client, status_of
from tests.scheduling import oracle_continuation, oracle_scores
from tests.served import ScoringOracle, Served, make_engine, serving

pytestmark = pytest.mark.wire

FAULTS = list(Fault)
KINDS = {Fault.INVALID_LOGITS: ModelOutputError, Fault.EMPTY_SUPPORT: InvalidRequestError}
MESSAGES = {
    Fault.INVALID_LOGITS: "the model's logits for this request are NaN or infinite",
    Fault.EMPTY_SUPPORT: "no token is left to sample: allowed_token_ids, bad_words",
}
PROMPT = [3, 1, 4, 1, 5, 9]


class FaultyOracle(ScoringOracle):
    """Can't sample some sequences, once they have so many tokens."""

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(layout)
        self.faults: dict[int, tuple[Fault, int]] = {}  # by sequence id, with the length
        self.most_faults = 0  # in one step

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        result = super().execute(plan, masks)
        for row, (sequence_id, index) in enumerate(
            zip(result.sequence_ids, plan.sample_index, strict=True)
        ):
            fault, length = self.faults.get(sequence_id, (None, 0))
            if fault is not None and plan.positions[index] + 1 >= length:
                result.faults[row] = fault
                result.token_ids[row] = 0
                result.logprobs.pop(row, None)
        self.most_faults = max(self.most_faults, len(result.faults))
        return result


def alone(seed: int, *, max_tokens: int, choice: int = 0) -> list[int]:
    return oracle_continuation(
        PROMPT, max_tokens=max_tokens, seed=fork_seed(seed, choice), ignore_eos=True
    )


def counted(served: Served) -> tuple[int, int]:
    stats = served.engine.stats()
    return stats.num_invalid_logits, stats.num_empty_supports


@pytest.mark.parametrize("num_before", [0, 3])  # tokens that it has got
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_counted_and_not_noticed_by_mates(fault: Fault, num_before: int) -> None:
    served = Served(FaultyOracle)
    for request_id in (1, 2, 3):
        served.add(request_id, PROMPT, max_tokens=9, ignore_eos=True)
    served.executor.faults[2] = (fault, len(PROMPT) + num_before)
    served.drain()
    assert list(served.failures) == [2]
    assert type(served.failures[2]) is KINDS[fault]
    assert str(served.failures[2]).startswith(MESSAGES[fault])
    for request_id in (1, 3):
        assert served.tokens[request_id, 0] == alone(request_id, max_tokens=9)
    assert served.tokens.get((2, 0), []) == alone(2, max_tokens=9)[:num_before]
    assert [*served.ends] == [(1, 0), (3, 0)]
    assert counted(served) == ((1, 0) if fault is Fault.INVALID_LOGITS else (0, 1))
    served.add(2, PROMPT, max_tokens=9, ignore_eos=True)  # the id is free again
    served.drain()
    assert served.tokens[2, 0][num_before:] == alone(2, max_tokens=9)


@pytest.mark.parametrize(
    "num_before", [{1: 0}, {2: 0}, {3: 0}, {1: 2}, {2: 2}, {3: 2}, {2: 0, 3: 0}, {1: 3, 2: 2, 3: 2}]
)
def test_a_faulty_choice_takes_its_siblings_along_and_is_counted_once(
    num_before: dict[int, int],
) -> None:
    """By sequence, the tokens that each has got. Those of several fail in one step."""
    served = Served(FaultyOracle)
    served.add(7, PROMPT, max_tokens=9, n=3, ignore_eos=True)  # sequences 1 to 3
    served.add(8, PROMPT, max_tokens=9, n=2, ignore_eos=True)
    for sequence_id, count in num_before.items():
        served.executor.faults[sequence_id] = (Fault.INVALID_LOGITS, len(PROMPT) + count)
    served.drain()
    assert served.executor.most_faults == len(num_before)
    assert list(served.failures) == [7]
    assert {key[0] for key in served.ends} == {8}
    for choice in range(2):
        assert served.tokens[8, choice] == alone(8, max_tokens=9, choice=choice)
    for choice in range(3):
        tokens = served.tokens.get((7, choice), [])
        assert tokens == alone(7, max_tokens=9, choice=choice)[: len(tokens)]
        assert len(tokens) == num_before.get(choice + 1, len(tokens)) < 9
    assert counted(served) == (1, 0)


def test_all_fail_at_once() -> None:
    served = Served(FaultyOracle)
    for request_id in (1, 2, 3, 4):
        served.add(request_id, PROMPT, max_tokens=9, ignore_eos=True)
        served.executor.faults[request_id] = (FAULTS[request_id % 2], len(PROMPT) + 2)
    served.drain()
    assert sorted(served.failures) == [1, 2, 3, 4]
    assert counted(served) == (2, 2)
    served.add(5, PROMPT, ignore_eos=True)
    served.drain()
    assert served.tokens[5, 0] == alone(5, max_tokens=4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_step_in_which_others_leave(fault: Fault) -> None:
    served = Served(FaultyOracle)
    served.add(1, PROMPT, max_tokens=9, ignore_eos=True)
    served.add(2, PROMPT, max_tokens=3, ignore_eos=True)
    served.add(3, PROMPT, max_tokens=9, ignore_eos=True)
    served.add(4, PROMPT, max_tokens=3, ignore_eos=True)
    # Also in its own last token, which it would have ended with.
    for sequence_id in (1, 4):
        served.executor.faults[sequence_id] = (fault, len(PROMPT) + 2)
    for _ in range(2):
        served.engine.step()
    served.abort(3)
    served.engine.step()
    assert sorted(served.failures) == [1, 4]
    assert {key: output.finish_reason for key, output in served.ends.items()} == {
        (2, 0): FinishReason.LENGTH
    }
    assert served.tokens[2, 0] == alone(2, max_tokens=3)
    assert len(served.tokens[3, 0]) == 2
    assert not served.engine.has_work
    served.scheduler.check_invariants()
    assert served.engine.stats().num_free_blocks == served.engine.stats().num_blocks


@pytest.mark.parametrize("num_scored", [0, 16])
def test_a_prompt_whose_logits_are_damaged_fails_with_all_choices(num_scored: int) -> None:
    served = Served(FaultyOracle, max_num_batched_tokens=9)
    served.add(1, PROMPT, max_tokens=20, ignore_eos=True)
    served.engine.step()
    prompt = [1 + place % 5 for place in range(40)]
    served.add(2, prompt, n=3, params={"prompt_logprobs": 0})
    for _ in range(num_scored // 8):
        served.engine.step()
    served.executor.faulty = {2}
    served.drain()
    assert list(served.failures) == [2]
    assert isinstance(served.failures[2], ModelOutputError)
    assert served.scores[2, 0] == oracle_scores(prompt)[:num_scored]
    assert not any(tokens for (request_id, _), tokens in served.tokens.items() if request_id == 2)
    assert served.tokens[1, 0] == alone(1, max_tokens=20)
    assert counted(served) == (1, 0)


def test_an_abort_of_one_that_failed_is_ignored() -> None:
    served = Served(FaultyOracle)
    served.add(1, PROMPT, n=2, ignore_eos=True)
    served.executor.faults[1] = (Fault.INVALID_LOGITS, 0)
    served.engine.step()
    served.abort(1)
    served.abort(1, 1)
    served.drain()
    assert list(served.failures) == [1]
    assert not served.ends


def test_faults_under_preemption_change_no_mate() -> None:
    served = Served(FaultyOracle, num_blocks=12, max_num_batched_tokens=16)
    for request_id in range(1, 7):
        served.add(request_id, PROMPT, max_tokens=30, ignore_eos=True)
    for sequence_id in (2, 5):
        served.executor.faults[sequence_id] = (Fault.INVALID_LOGITS, len(PROMPT) + 7)
    served.drain()
    assert served.engine.stats().num_preemptions > 0
    assert sorted(served.failures) == [2, 5]
    for request_id in (1, 3, 4, 6):
        assert served.tokens[request_id, 0] == alone(request_id, max_tokens=30)


@pytest.fixture
def faulty() -> Iterator[tuple[Engine, FaultyOracle]]:
    engine, executor = make_engine(FaultyOracle)
    engine.start()
    yield engine, executor
    engine.stop()


def test_clients_are_told_by_status_and_operators_by_counter(
    faulty: tuple[Engine, FaultyOracle],
) -> None:
    engine, executor = faulty
    executor.faults |= {
        1: (Fault.INVALID_LOGITS, len(PROMPT) + 2),
        2: (Fault.EMPTY_SUPPORT, len(PROMPT) + 2),
    }
    with serving(engine) as client:
        options = {"token_ids": PROMPT, "max_tokens": 9, "seed": 1, "ignore_eos": True}
        for fault, code in (
            (Fault.INVALID_LOGITS, grpc.StatusCode.INTERNAL),
            (Fault.EMPTY_SUPPORT, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            status, details = status_of(client.generate(**options))
            assert status == code
            assert details.startswith(MESSAGES[fault])
        tokens = [token for each in client.generate(**options) for token in each.token_ids]
        assert tokens == alone(1, max_tokens=9)
        stats = stats_of(client)
        assert (stats.num_invalid_logits, stats.num_empty_supports) == (1, 1)


def stats_of(client: Client) -> common_pb2.EngineStats:
    return client.call("GetStats").engines[0].stats
