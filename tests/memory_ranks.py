"""Ranks that share memory: as threads here, or as processes (`python -m tests.memory_ranks`)."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import TCPStore

from workers.collectives.shared_memory import BUFFER_BYTES, SharedMemory, join_host
from workers.parallel import open_rendezvous

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
NUM_CALLS = 30
SUMMED = (torch.float32, torch.bfloat16, torch.float16)

T = TypeVar("T")


def on_all(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What each task returns, each on a thread of its own."""
    with ThreadPoolExecutor(len(tasks)) as threads:
        return [each.result() for each in [threads.submit(task) for task in tasks]]


def find_others(size: int) -> tuple[list[SharedMemory | None], list[object]]:
    """What every rank gets, and what they met at."""
    store, port = open_rendezvous(size, HOST)
    stores = [store, *(TCPStore(HOST, port, size, is_master=False) for _ in range(size - 1))]
    ranks = on_all(
        [
            lambda rank=rank: join_host(stores[rank], rank=rank, size=size, sampler_rank=0)
            for rank in range(size)
        ]
    )
    return ranks, stores


@contextmanager
def joined(size: int) -> Iterator[list[SharedMemory]]:
    ranks, _ = find_others(size)
    try:
        yield [rank for rank in ranks if rank is not None]
    finally:
        for rank in ranks:
            if rank is not None:
                rank.close()


@contextmanager
def processes(ranks: Iterable[int], ports: dict[int, int]) -> Iterator[list[subprocess.Popen]]:
    """Ranks as processes, in a group of each size that has a port; killed at the end."""
    command = [sys.executable, "-m", "tests.memory_ranks"]
    groups = [f"{size}:{port}" for size, port in ports.items()]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            [*command, str(rank), *groups], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
        )
        for rank in ranks
    ]
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.communicate()


def draw_parts(draw: random.Random, size: int, call: int) -> list[torch.Tensor]:
    """What each rank brings to a call."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    dtype = draw.choice(SUMMED)
    shape = draw.choice([(0, 7), (1, 1), (3, 5), (draw.randrange(1, 40), draw.randrange(1, 300))])
    if call == 0:  # several pieces, the last one odd
        shape = (3, BUFFER_BYTES // dtype.itemsize // 2 - 1)
    return [torch.randn(shape, generator=generator).mul(9).to(dtype) for _ in range(size)]


def plain_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def make_calls(group: SharedMemory, rank: int, size: int) -> str:
    """Makes drawn calls and holds them to what torch makes of the same; a digest of all sums."""
    draw = random.Random(size)
    digest = sha256()
    for call in range(NUM_CALLS):
        parts = draw_parts(draw, size, call)
        own = parts[rank].clone()
        kind = draw.randrange(4)
        if kind == 0:
            assert group.all_gather(own).equal(torch.cat(parts, dim=-1))
        elif kind == 1:
            joined = group.gather_to_sampler(own)
            assert (joined is None) == (rank > 0)
            assert joined is None or joined.equal(torch.cat(parts, dim=-1))
        elif kind == 2:
            assert group.broadcast_from_sampler(own).equal(parts[0])
        else:
            total = group.all_reduce(own)
            assert total.equal(plain_sum(parts))
            digest.update(total.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(rank: int, ports: dict[int, int]) -> None:
    """Joins the groups that have such a rank; tells of its calls, and stays until input ends."""
    torch.set_num_threads(1)
    groups = []
    for size, port in ports.items():
        if rank < size:
            store = TCPStore(HOST, port, size, is_master=False)
            group = join_host(store, rank=rank, size=size, sampler_rank=0)
            assert group is not None
            groups.append(group)
            print(size, make_calls(group, rank, size), flush=True)
    sys.stdin.read()
    for group in groups:
        group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), dict(tuple(map(int, each.split(":"))) for each in sys.argv[2:]))
