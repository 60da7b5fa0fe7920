"""Steps in which only steady choices run: their tokens go to each client as columns."""

from collections import defaultdict

import pytest

from runtime.engine_codec import decode_outputs, encode_outputs, encode_tokens
from runtime.live_requests import Outputs, Recipients, TokenBatch
from runtime.request import FinishReason, Request, RequestOutput
from runtime.sampling_params import fork_seed
from tests.params import complete_params
from tests.scheduling import oracle_continuation
from tests.served import make_engine

pytestmark = pytest.mark.wire

BATCH = TokenBatch(
    Recipients((5, 2**64 - 1, 5), (0, 0, 1), (16, 0, 32)),
    (7, 2**31 - 1, 9),
    (None, FinishReason.STOP, None),
)


def test_a_batch_reads_as_its_outputs() -> None:
    assert list(BATCH) == [
        RequestOutput(5, (7,), None, 0, 16),
        RequestOutput(2**64 - 1, (2**31 - 1,), FinishReason.STOP, 0, 0),
        RequestOutput(5, (9,), None, 1, 32),
    ]


def test_a_batch_is_the_message_of_its_outputs() -> None:
    message = encode_tokens(BATCH)
    assert message == encode_outputs(list(BATCH))
    assert decode_outputs(message) == list(BATCH)


class Clients:
    """Two clients of an engine that is stepped by hand, and what each got in which form."""

    def __init__(self, **options: object) -> None:
        self.engine, _ = make_engine(depth=1, **options)
        self.steps: list[list[Outputs]] = [[], []]
        self._connections = [self.engine.connect(steps.append) for steps in self.steps]

    def add(self, client: int, request_id: int, prompt: list[int], **params: object) -> None:
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=complete_params(ignore_eos=True, **params),
            seed=request_id,
        )
        self.engine.add(self._connections[client], request, arrived_s=0.0)

    def abort(self, client: int, request_id: int) -> None:
        self.engine.abort(self._connections[client], request_id)

    def drain(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def tokens(self, client: int) -> dict[tuple[int, int], list[int]]:
        """By request and choice."""
        tokens: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for outputs in self.steps[client]:
            for output in outputs:
                tokens[output.request_id, output.choice].extend(output.token_ids)
        return tokens

    def num_batches(self, client: int) -> int:
        return sum(isinstance(each, TokenBatch) for each in self.steps[client])


def expected(request_id: int, prompt: list[int], count: int) -> list[int]:
    return oracle_continuation(prompt, max_tokens=count, seed=request_id, ignore_eos=True)


def test_each_client_gets_its_own_tokens_once_a_step() -> None:
    clients = Clients()
    clients.add(0, 1, [1, 2, 3], max_tokens=9)
    clients.add(1, 1, [4, 5], max_tokens=6)
    clients.add(0, 2, [6], max_tokens=7)
    clients.drain()
    assert clients.tokens(0) == {(1, 0): expected(1, [1, 2, 3], 9), (2, 0): expected(2, [6], 7)}
    assert clients.tokens(1) == {(1, 0): expected(1, [4, 5], 6)}
    assert [len(each) for each in clients.steps] == [9, 6]
    assert clients.num_batches(0) > 0
    assert clients.num_batches(1) > 0


def test_ends_come_with_the_last_tokens_of_a_batch() -> None:
    clients = Clients()
    clients.add(0, 1, [1, 2, 3], max_tokens=5)
    clients.add(0, 2, [4, 5, 6], max_tokens=5, n=2)
    clients.drain()
    ends = [
        (step, output.request_id, output.choice)
        for step, outputs in enumerate(clients.steps[0])
        for output in outputs
        if output.finish_reason is FinishReason.LENGTH
    ]
    assert ends == [(4, 1, 0), (4, 2, 0), (5, 2, 1)]
    assert isinstance(clients.steps[0][4], TokenBatch)
    seed = fork_seed(2, 1)
    assert clients.tokens(0)[2, 1] == oracle_continuation(
        [4, 5, 6], max_tokens=5, seed=seed, ignore_eos=True
    )


def test_who_leaves_or_comes_between_two_steps_shifts_nobody() -> None:
    clients = Clients()
    for request_id in (1, 2, 3):
        clients.add(0, request_id, [request_id, 7], max_tokens=12)
    for _ in range(4):
        clients.engine.step()
    clients.abort(0, 2)
    clients.engine.step()
    clients.engine.step()
    clients.add(0, 4, [9], max_tokens=3)
    clients.drain()
    tokens = clients.tokens(0)
    assert tokens.pop((2, 0)) == expected(2, [2, 7], 4)
    assert tokens == {
        (1, 0): expected(1, [1, 7], 12),
        (3, 0): expected(3, [3, 7], 12),
        (4, 0): expected(4, [9], 3),
    }
    assert clients.num_batches(0) > 0


def test_preempted_ones_get_all_their_tokens() -> None:
    clients = Clients(num_blocks=8, block_size=4)
    for request_id in (1, 2, 3):
        clients.add(request_id % 2, request_id, [request_id, 7, 8], max_tokens=16)
    clients.drain()
    assert clients.engine.stats().num_preemptions > 0
    assert clients.tokens(0) | clients.tokens(1) == {
        (request_id, 0): expected(request_id, [request_id, 7, 8], 16) for request_id in (1, 2, 3)
    }


def test_log_probabilities_stay_with_their_tokens() -> None:
    clients = Clients()
    clients.add(0, 1, [1, 2, 3], max_tokens=5, logprobs=2)
    clients.add(0, 2, [4, 5, 6], max_tokens=5)
    clients.drain()
    outputs = [output for step in clients.steps[0] for output in step]
    assert [len(each.logprobs) for each in outputs] == [1, 0] * 5


def test_scores_come_beside_tokens_of_others() -> None:
    clients = Clients(max_num_batched_tokens=8)
    clients.add(0, 1, [1, 2, 3], max_tokens=20)
    for _ in range(3):
        clients.engine.step()
    clients.add(0, 2, list(range(1, 41)), max_tokens=2, prompt_logprobs=0)
    clients.drain()
    outputs = [output for step in clients.steps[0] for output in step]
    assert sum(len(each.scores) for each in outputs if each.request_id == 2) == 39
    assert len(clients.tokens(0)[1, 0]) == 20
