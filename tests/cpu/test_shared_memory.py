"""Collectives through a host's memory: what they compute, and how they end."""

import errno
import logging
import os
import re
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.memory_ranks import (
    HOST,
    joined,
    make_calls,
    on_all,
    plain_sum,
    processes,
)
from workers.collectives import host_memory
from workers.collectives.host_memory import NotSharedError, attach, create
from workers.collectives.shared_memory import SharedMemory, join_host
from workers.config import WorkerConfig
from workers.errors import CollectiveError
from workers.parallel import join, open_rendezvous

pytestmark = pytest.mark.cpu

LINE_BYTES = 128  # of collectives.c; a line begins with the rank's sequence
HALVES = (torch.bfloat16, torch.float16)


def wait_for_first_piece(ranks: list[SharedMemory]) -> None:
    """Until rank 0 has told of its first piece, and waits for rank 1, which has none."""
    memory = ranks[1]._memory
    assert memory is not None
    first, second = slice(0, 4), slice(LINE_BYTES, LINE_BYTES + 4)
    while memory._mapped[first] == memory._mapped[second]:
        pass  # the test's timeout bounds it


def sum_parts(ranks: list[SharedMemory], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    pairs = zip(ranks, parts, strict=True)
    return on_all([partial(rank.all_reduce, part.clone()) for rank, part in pairs])


def our_memory() -> list[str]:
    """What this process has of memory that we made."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(each))
        except FileNotFoundError:  # the folder's own
            continue
    return [each for each in found if "memfd:lockstep" in each]


@pytest.mark.full
def test_processes_compute_what_torch_does_and_agree_in_every_bit() -> None:
    """Of 2, 3 and 4 ranks, the last of them more than a small machine has cores."""
    sizes = (2, 3, 4)
    stores = {size: open_rendezvous(size, HOST) for size in sizes}
    with processes(range(4), {size: stores[size][1] for size in sizes}) as ranks:
        told = []
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            told += [process.stdout.readline() for size in sizes if rank < size]

    digests = {line.split()[0]: line.split()[1] for line in told}
    assert len(told) == sum(sizes)
    assert {line.strip() for line in told} == {" ".join(each) for each in digests.items()}


def test_a_killed_rank_ends_the_wait_for_it_and_leaves_nothing() -> None:
    shared = set(os.listdir("/dev/shm"))
    store, port = open_rendezvous(2, HOST)
    with processes([1], {2: port}) as [process]:
        group = join_host(store, rank=0, size=2, sampler_rank=0)
        assert group is not None
        make_calls(group, 0, 2)
        assert process.stdout is not None
        process.stdout.readline()
        threading.Timer(0, process.kill).start()

        with pytest.raises(CollectiveError, match="failed: the process of rank 1 has ended"):
            add(group)
        with pytest.raises(CollectiveError, match="this rank has left the group"):
            add(group)
    group.close()
    assert set(os.listdir("/dev/shm")) <= shared
    assert our_memory() == []


@pytest.mark.parametrize("closing", [0, 1])
def test_closing_ends_a_wait(closing: int) -> None:
    """A rank's own, from another thread, and that of a rank that waits for one that closes."""
    with joined(2) as ranks:

        def close() -> None:
            wait_for_first_piece(ranks)
            ranks[closing].close()

        def wait() -> None:
            said = "this rank has left" if closing == 0 else "rank 1 has left"
            with pytest.raises(CollectiveError, match=said):
                add(ranks[0])

        on_all([wait, close])
    assert our_memory() == []


def test_what_was_sent_before_a_rank_left_arrives() -> None:
    with joined(2) as ranks:
        ranks[1].gather_to_sampler(torch.ones(2))
        ranks[1].close()

        gathered = ranks[0].gather_to_sampler(torch.zeros(2))

    assert gathered is not None
    assert gathered.tolist() == [0, 0, 1, 1]


def add(group: SharedMemory, *, size: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return group.all_reduce(torch.ones(size, dtype=dtype))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            add,
            lambda group: group.all_gather(torch.ones(3)),
            "rank 0 runs all_reduce of 12 bytes of float32, "
            "rank 1 all_gather of 12 bytes of float32 in rows of 12",
        ),
        (
            add,
            partial(add, size=4),
            "rank 0 runs all_reduce of 12 bytes of float32, "
            "rank 1 all_reduce of 16 bytes of float32",
        ),
        (
            partial(add, size=4, dtype=torch.bfloat16),
            partial(add, size=4, dtype=torch.float16),
            "rank 0 runs all_reduce of 8 bytes of bfloat16, "
            "rank 1 all_reduce of 8 bytes of float16",
        ),
    ],
)
def test_ranks_that_run_different_calls_are_told_both(first, second, said: str) -> None:
    """Whoever sees it first; the other may hear that this one has left."""
    one, other = said.removeprefix("rank 0 runs ").split(", rank 1 ")
    with joined(2) as ranks:

        def run(rank: int) -> str:
            with pytest.raises(CollectiveError) as failure:
                (first, second)[rank](ranks[rank])
            return str(failure.value)

        heard = on_all([partial(run, 0), partial(run, 1)])

    reasons = {each.removeprefix("a collective failed: ") for each in heard}
    both = {said, f"rank 1 runs {other}, rank 0 {one}"}
    assert reasons & both
    assert reasons <= both | {"rank 0 has left the group", "rank 1 has left the group"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_numbers_that_have_no_sum_here_are_refused(dtype: torch.dtype) -> None:
    said = f"there are no sums of {dtype}"
    with joined(2) as ranks, pytest.raises(CollectiveError, match=said):
        add(ranks[0], dtype=dtype)


def test_tensors_with_gaps_are_refused_where_they_would_be_written() -> None:
    said = r"all_reduce takes no torch.float32 of shape \(3, 2\) and strides \(1, 3\)"
    with joined(2) as ranks, pytest.raises(CollectiveError, match=said):
        ranks[0].all_reduce(torch.ones(2, 3).t())


def test_every_half_number_is_read_and_rounded_as_torch_does() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    torch.manual_seed(1)
    other = every[torch.randperm(len(every))]
    with joined(2) as ranks:
        for dtype in HALVES:
            parts = [every.view(dtype), other.view(dtype)]
            zeros = torch.zeros_like(parts[0])
            for pair in (parts, [parts[0], zeros], [parts[0], parts[0].roll(1)]):
                sums = sum_parts(ranks, pair)
                expected = plain_sum(pair)
                for total in sums:
                    assert total.isnan().equal(expected.isnan())
                    bits, wanted = total.view(torch.int16), expected.view(torch.int16)
                    assert bits[~total.isnan()].equal(wanted[~total.isnan()])


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    parts = [torch.randn(40, 77).to(torch.bfloat16) for _ in range(3)]
    with joined(3) as ranks:
        whole = sum_parts(ranks, parts)
        alone = [sum_parts(ranks, [part[row : row + 1] for part in parts]) for row in range(40)]

    for rank in range(3):
        assert whole[rank].equal(whole[0])
        assert torch.cat([each[rank] for each in alone]).equal(whole[0])


def refuse_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")


def refuse_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_memory.os, "posix_fallocate", fail)


def be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_network", threading.get_ident)


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        (refuse_compiler, "rank 0: there is no C compiler"),
        (refuse_memory, "rank 0: .* No space left on device"),
        (be_elsewhere, "rank 1: it is on another host than rank 0, or in another network"),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_where_one_rank_cannot_all_go_by_gloo(
    refuse,
    said: str,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse(monkeypatch)
    caplog.set_level(logging.INFO)
    store, port = open_rendezvous(2, HOST)

    def run(rank: int) -> list[list[float] | None]:
        config = WorkerConfig(
            model_path="",
            rank=rank,
            tp_size=2,
            rendezvous_host=HOST,
            rendezvous_port=port,
            deterministic=deterministic,
        )
        parallel = join(config, store if rank == 0 else None)
        own = torch.tensor([rank + 1.0])
        gathered = parallel.gather_to_sampler(own)
        found = [parallel.all_gather(own), parallel.broadcast_from_sampler(own.clone())]
        found.append(parallel.all_reduce(own))
        parallel.close()
        return [None if gathered is None else gathered.tolist(), *(x.tolist() for x in found)]

    assert on_all([partial(run, rank) for rank in range(2)]) == [
        [[1, 2], [1, 2], [1], [3]],
        [None, [1, 2], [1], [3]],
    ]
    [message] = [each.getMessage() for each in caplog.records if "gloo" in each.getMessage()]
    assert re.search(said, message)
    assert our_memory() == []


def test_what_is_not_the_memory_is_not_opened(tmp_path: Path) -> None:
    memory, offer = create(4096)
    with (tmp_path / "other").open("wb") as other:
        for process, descriptor in ((os.getpid(), other.fileno()), (os.getpid(), 1 << 20)):
            wrong = type(offer)(
                process=process, descriptor=descriptor, name=offer.name, network=offer.network
            )
            with pytest.raises(NotSharedError, match="rank 0's memory"):
                attach(wrong, 4096)
    with pytest.raises(NotSharedError, match="rank 0 has 4096 bytes where it needs 8192"):
        attach(offer, 8192)
    memory.close()
