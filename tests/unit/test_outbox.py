"""What waits for one frontend, and the end of what is too much."""

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from runtime.errors import CapacityError, UnavailableError
from runtime.live_requests import Recipients, TokenBatch
from runtime.outbox import MESSAGE_VALUES, Outbox, num_values_of
from runtime.request import RequestFailure, RequestOutput, TokenLogprobs

pytestmark = pytest.mark.unit

TIMEOUT_S = 10


class Overflow:
    """Counts."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


def make_outbox(num_messages: int) -> tuple[Outbox[str], Overflow]:
    """With room for so many messages of one value."""
    overflow = Overflow()
    most = num_messages * (MESSAGE_VALUES + 1)
    return Outbox(max_values=most, on_overflow=overflow), overflow


def test_what_is_taken_makes_room() -> None:
    outbox, overflow = make_outbox(2)
    for number in range(10):
        outbox.put(f"a{number}", 1)
        outbox.put(f"b{number}", 1)
        assert (outbox.take(), outbox.take()) == (f"a{number}", f"b{number}")
    assert not outbox.has_overflowed
    assert overflow.count == 0


def test_too_much_is_dropped_and_nothing_comes_after_it() -> None:
    outbox, overflow = make_outbox(2)
    for item in "abcde":
        outbox.put(item, 1)
    assert overflow.count == 1
    assert outbox.has_overflowed
    for _ in range(2):
        outbox.put("f", 1)
        with pytest.raises(CapacityError, match="34 values wait for it, and 34 may"):
            outbox.take()


def test_messages_without_values_take_room_too() -> None:
    outbox, overflow = make_outbox(2)
    for _ in range(3):
        outbox.put("stats")
    assert overflow.count == 1


def test_who_waits_hears_of_it() -> None:
    outbox, _ = make_outbox(1)
    taken: SimpleQueue[str | CapacityError] = SimpleQueue()

    def take_all() -> None:
        try:
            while True:
                taken.put(outbox.take())
        except CapacityError as error:
            taken.put(error)

    reader = threading.Thread(target=take_all)
    reader.start()
    outbox.put("a", 1)
    assert taken.get(timeout=TIMEOUT_S) == "a"
    outbox.put("huge", 100)
    assert isinstance(taken.get(timeout=TIMEOUT_S), CapacityError)
    reader.join(TIMEOUT_S)
    assert not reader.is_alive()


def read_all(outbox: Outbox[str]) -> Iterator[str]:
    """Until it has overflowed."""
    while True:
        try:
            yield outbox.take()
        except CapacityError:
            return


def test_what_is_read_before_the_end_has_no_gap() -> None:
    """Where a thread reads while another drops what is too much."""

    def write(outbox: Outbox[str]) -> None:
        for number in range(500):
            outbox.put(str(number), 1)
        outbox.put("far too much", 100_000)

    for _ in range(100):
        outbox, _ = make_outbox(1000)
        writer = threading.Thread(target=write, args=(outbox,))
        writer.start()
        read = list(read_all(outbox))
        writer.join(TIMEOUT_S)
        assert read == [str(number) for number in range(len(read))]


def test_tokens_and_log_probabilities_are_values() -> None:
    batch = TokenBatch(Recipients((1, 2), (0, 0), (0, 0)), (7, 8), (None, None))
    assert num_values_of(batch) == 2
    logprobs = TokenLogprobs(-1.0, (1, 2, 3), (-1.0, -2.0, -3.0))
    outputs = [
        RequestOutput(1, (7, 8)),
        RequestOutput(2, (9,), logprobs=(logprobs,), scores=(logprobs, logprobs)),
        RequestFailure(3, UnavailableError("gone")),
    ]
    assert num_values_of(outputs) == 2 + 1 + 3 * 7 + 1
