"""How many requests a key may have at once."""

from contextlib import ExitStack

import pytest

from runtime.errors import CapacityError
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
