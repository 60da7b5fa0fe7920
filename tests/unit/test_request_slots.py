"""How many requests a key, and all together, may have at once."""

from contextlib import ExitStack

import pytest

from runtime.errors import CapacityError, InvalidRequestError
from runtime.frontend.request_slots import RequestSlots

pytestmark = pytest.mark.unit


def test_a_key_has_so_many_slots_and_others_have_their_own() -> None:
    slots = RequestSlots(2)
    with ExitStack() as taken:
        taken.enter_context(slots.take("acme"))
        taken.enter_context(slots.take("acme"))
        with (
            pytest.raises(CapacityError, match="max_requests_per_key=2") as caught,
            slots.take("acme"),
        ):
            pass
        assert caught.value.retry_after_s == 1.0
        taken.enter_context(slots.take("other"))
    with slots.take("acme"), slots.take("acme"):
        pass


def test_all_keys_together_have_so_many() -> None:
    slots = RequestSlots(2, 3)
    with ExitStack() as taken:
        for tenant in ("acme", "acme", "other"):
            taken.enter_context(slots.take(tenant))
        assert slots.num_taken == 3
        with pytest.raises(CapacityError, match="max_requests=3"), slots.take("third"):
            pass
        assert slots.num_taken == 3
    assert slots.num_taken == 0
    with slots.take("third"):
        pass


def test_a_request_that_fails_gives_its_slot_back() -> None:
    slots = RequestSlots(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="failed"), slots.take("acme"):
            raise ValueError("failed")


def test_without_a_limit_there_is_always_one() -> None:
    slots = RequestSlots(None)
    with ExitStack() as taken:
        for _ in range(1000):
            taken.enter_context(slots.take("acme"))


def test_a_request_of_several_prompts_takes_as_many_or_none() -> None:
    slots = RequestSlots(4, 6)
    with slots.take("acme") as mine, slots.take("other"):
        mine.grow(2)
        assert slots.num_taken == 4
        with pytest.raises(InvalidRequestError, match=r"5 entries.*at most max_requests_per_key=4"):
            mine.grow(2)
        with slots.take("acme"), pytest.raises(CapacityError, match="has 4 requests under way"):
            mine.grow(1)
        with slots.take("other"), slots.take("third"), pytest.raises(CapacityError, match="=6"):
            mine.grow(1)
        assert slots.num_taken == 4
    assert slots.num_taken == 0


def test_more_than_all_slots_are_never_there() -> None:
    slots = RequestSlots(None, 6)
    with slots.take("acme") as mine:
        with pytest.raises(InvalidRequestError, match=r"7 entries.*at most max_requests=6"):
            mine.grow(6)
        assert slots.num_taken == 1
