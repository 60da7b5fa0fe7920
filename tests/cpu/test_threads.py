"""Threads that share kernels' work: each item is run once, by as many threads as are asked for."""

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from workers.native.build import load
from workers.native.calls import load_threads

pytestmark = pytest.mark.cpu

ITEM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
WAIT_S = 60


def run_items(item: object, count: int, num_threads: int) -> None:
    library = load_threads()
    library.lockstep_run_items.argtypes = (ITEM, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    library.lockstep_run_items.restype = None
    library.lockstep_run_items(ITEM(item), None, count, num_threads)


def check_job(count: int, num_threads: int) -> None:
    ran: list[tuple[int, int]] = []
    run_items(lambda job, item, thread: ran.append((item, thread)), count, num_threads)
    assert sorted(item for item, _ in ran) == [*range(count)]
    assert {thread for _, thread in ran} <= set(range(num_threads))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_each_item_is_run_once(num_threads: int) -> None:
    for count in (0, 1, 2, 7, 100):
        for _ in range(20):
            check_job(count, num_threads)


def test_helpers_that_sleep_are_woken() -> None:
    """They sleep within milliseconds; with each thread in one item no item waits for another."""
    num_threads = 3
    for pause_s in (0.0, 0.05, 0.3):
        threading.Event().wait(pause_s)  # no synchronisation: time for them to fall asleep in
        together = threading.Barrier(num_threads)
        broken: list[int] = []

        def meet(job: object, item: int, thread: int, *, together=together, broken=broken) -> None:
            try:
                together.wait(WAIT_S)
            except threading.BrokenBarrierError:
                broken.append(item)

        run_items(meet, num_threads, num_threads)
        assert broken == []


def test_items_are_done_when_the_call_returns() -> None:
    """Also one that takes longer than the caller waits awake."""
    second, may_end = threading.Event(), threading.Timer(0.2, lambda: None)
    done: list[int] = []

    def work(job: object, item: int, thread: int) -> None:
        if item == 0 and thread == 0:
            second.wait(WAIT_S)  # the other one is begun
        elif item == 1:
            second.set()
            may_end.start()
            may_end.join()
        done.append(item)

    run_items(work, 2, 2)
    assert sorted(done) == [0, 1]


def test_a_caller_that_finds_the_helpers_at_work_works_alone() -> None:
    is_inside, may_end = threading.Event(), threading.Event()

    def block(job: object, item: int, thread: int) -> None:
        is_inside.set()
        may_end.wait(WAIT_S)

    first = threading.Thread(target=run_items, args=(block, 2, 2))
    first.start()
    try:
        assert is_inside.wait(WAIT_S)
        ran: Counter[int] = Counter()
        run_items(lambda job, item, thread: ran.update([thread]), 10, 2)
        assert ran == {0: 10}
    finally:
        may_end.set()
        first.join()


def test_many_callers() -> None:
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(200):
                check_job(5, 3)
        except BaseException as failure:
            failures.append(failure)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


@contextmanager
def forked() -> Iterator[int]:
    """Yields the child's process id, and 0 in the child, which ends with the block."""
    child = os.fork()
    if child:
        yield child
        return
    status = 1
    try:
        yield 0
        status = 0
    finally:
        os._exit(status)


def test_a_forked_child_has_threads_of_its_own() -> None:
    check_job(10, 3)
    with forked() as child:
        if child == 0:
            for _ in range(20):
                check_job(10, 3)
    assert os.waitpid(child, 0)[1] == 0


def test_kernels_find_the_threads_wherever_they_are_loaded_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_threads()
    assert load("linear").has_vectors() in (0, 1)
