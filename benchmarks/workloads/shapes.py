"""The workloads that engines are compared on: A to D, and uniform ones of any size.

The same seed, kind and vocabulary give the same token ids wherever they are drawn.
"""

import random
from collections.abc import Callable, Mapping

from benchmarks.workloads.workload import Workload, WorkloadRequest, id_range

SEED = 20260

Draw = Callable[[random.Random, int], list[WorkloadRequest]]


def _ids(draw: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    low, size = id_range(vocab_size)
    return tuple(draw.randrange(low, low + size) for _ in range(count))


def _throughput(draw: random.Random, vocab_size: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(_ids(draw, 128, vocab_size), 64) for _ in range(32)]


def _mixed(draw: random.Random, vocab_size: int) -> list[WorkloadRequest]:
    requests = []
    for _ in range(32):
        # Prompt and its length come before the output's: the order of draws is the contract.
        prompt = _ids(draw, draw.randint(16, 512), vocab_size)
        requests.append(WorkloadRequest(prompt, draw.randint(8, 128)))
    return requests


def _single(draw: random.Random, vocab_size: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(_ids(draw, 128, vocab_size), 128)]


def _shared(draw: random.Random, vocab_size: int) -> list[WorkloadRequest]:
    prefix = _ids(draw, 512, vocab_size)
    return [WorkloadRequest(prefix + _ids(draw, 32, vocab_size), 32) for _ in range(32)]


KINDS: Mapping[str, Draw] = {"A": _throughput, "B": _mixed, "C": _single, "D": _shared}
PREFIX_KINDS = frozenset("D")


def make_workload(kind: str, *, model: str, vocab_size: int, seed: int = SEED) -> Workload:
    """One of KINDS. Raises KeyError: it is none."""
    return Workload(
        name=kind,
        model=model,
        vocab_size=vocab_size,
        seed=seed,
        prefix_caching=kind in PREFIX_KINDS,
        requests=tuple(KINDS[kind](random.Random(f"{seed}-{kind}"), vocab_size)),
    )


def make_uniform(
    *,
    model: str,
    vocab_size: int,
    num_requests: int,
    prompt_len: int,
    output_len: int,
    shared_len: int = 0,
    seed: int = SEED,
) -> Workload:
    """Requests of one shape; the first `shared_len` tokens of each prompt are the same."""
    name = f"{num_requests}x{prompt_len}+{output_len}" + (f"s{shared_len}" if shared_len else "")
    draw = random.Random(f"{seed}-{name}")
    shared = _ids(draw, shared_len, vocab_size)
    requests = tuple(
        WorkloadRequest(shared + _ids(draw, prompt_len - shared_len, vocab_size), output_len)
        for _ in range(num_requests)
    )
    return Workload(
        name=name,
        model=model,
        vocab_size=vocab_size,
        seed=seed,
        prefix_caching=shared_len > 0,
        requests=requests,
    )
