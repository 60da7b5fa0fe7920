"""Which of several engines gets a request."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.frontend.routing import PREFIX_TOKENS, SLACK_REQUESTS, choose, prefix_key
from runtime.frontend_config import Routing
from runtime.request import Request
from tests.params import complete_params

pytestmark = pytest.mark.unit

ENGINES = ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1")
IDLE = dict.fromkeys(ENGINES, 0)


def make_request(prompt: Sequence[int] = (1,), **fields: Any) -> Request:
    params = complete_params(max_tokens=4)
    return Request(request_id=0, prompt_token_ids=prompt, params=params, seed=0, **fields)


def pick(routing: Routing, loads: dict[str, int], request: Request | None = None) -> str:
    return choose(routing, loads, request or make_request(), random.Random(0))


def prompts(count: int) -> list[list[int]]:
    return [[number] * PREFIX_TOKENS for number in range(count)]


@pytest.mark.parametrize("routing", ["least_requests", "two_choices", "prefix"])
def test_one_engine_gets_all(routing: Routing) -> None:
    assert pick(routing, {"a": 100}) == "a"


def test_the_one_with_the_fewest_requests() -> None:
    assert pick("least_requests", {"a": 2, "b": 1, "c": 1}) == "b"


def test_the_better_of_two_at_random() -> None:
    source = random.Random(0)
    loads = {"a": 0, "b": 1, "c": 2}
    chosen = Counter(choose("two_choices", loads, make_request(), source) for _ in range(600))
    # "a" wins two pairs of three, "b" one, "c" none.
    assert 350 < chosen["a"] < 450
    assert chosen["c"] == 0


def test_requests_that_begin_alike_go_to_one_engine() -> None:
    begin = [*range(PREFIX_TOKENS)]
    requests = [make_request([*begin, number]) for number in range(20)]
    assert len({pick("prefix", IDLE, each) for each in requests}) == 1
    # In whatever order a frontend knows the engines.
    turned = dict(reversed(IDLE.items()))
    assert {pick("prefix", turned, each) for each in requests} == {
        pick("prefix", IDLE, requests[0])
    }


def test_different_prompts_are_spread() -> None:
    chosen = Counter(pick("prefix", IDLE, make_request(each)) for each in prompts(400))
    assert min(chosen[each] for each in ENGINES) > 60


def test_salts_share_no_engine_by_right() -> None:
    keys = {prefix_key(make_request(cache_salt=salt)) for salt in ("", "a", "b")}
    assert len(keys) == 3


def test_an_engine_that_comes_moves_its_own_prompts_alone() -> None:
    requests = [make_request(each) for each in prompts(200)]
    before = [pick("prefix", IDLE, each) for each in requests]
    after = [pick("prefix", {**IDLE, "10.0.0.5:1": 0}, each) for each in requests]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"10.0.0.5:1"}
    assert 20 < len(moved) < 70


def test_an_engine_with_many_more_is_passed_by() -> None:
    request = make_request()
    first = pick("prefix", IDLE, request)
    assert pick("prefix", IDLE | {first: SLACK_REQUESTS}, request) == first
    # All have many: that is no reason to go elsewhere.
    assert pick("prefix", dict.fromkeys(ENGINES, 500), request) == first
    second = pick("prefix", IDLE | {first: 2 * SLACK_REQUESTS}, request)
    assert second != first
    # And the next one to look at is the same for all who have this beginning.
    without = {each: 0 for each in ENGINES if each != first}
    assert second == pick("prefix", without, request)
