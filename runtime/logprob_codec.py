"""Log probabilities between engine and frontend, in the columns of engine.proto's Logprobs."""

from collections.abc import Sequence
from itertools import accumulate, chain

from protos import engine_pb2
from runtime.arrays import FLOAT32, INT32, pack, unpack
from runtime.request import TokenLogprobs

Entries = tuple[TokenLogprobs, ...]


def encode_logprobs(choices: Sequence[Entries]) -> engine_pb2.Logprobs | None:
    """One tuple for each choice of the message; None where all are empty."""
    entries = list(chain.from_iterable(choices))
    if not entries:
        return None
    return engine_pb2.Logprobs(
        num_entries=pack(INT32, map(len, choices)),
        logprobs=pack(FLOAT32, (each.logprob for each in entries)),
        num_tops=pack(INT32, (len(each.top_token_ids) for each in entries)),
        top_token_ids=pack(INT32, chain.from_iterable(each.top_token_ids for each in entries)),
        top_logprobs=pack(FLOAT32, chain.from_iterable(each.top_logprobs for each in entries)),
    )


def decode_logprobs(name: str, message: engine_pb2.Logprobs, num_choices: int) -> list[Entries]:
    """One tuple for each choice; `message` is set.

    Raises ValueError: the arrays don't fit together; the message names them and the numbers.
    """
    counts = unpack(INT32, f"{name}.num_entries", message.num_entries)
    logprobs = unpack(FLOAT32, f"{name}.logprobs", message.logprobs)
    num_tops = unpack(INT32, f"{name}.num_tops", message.num_tops)
    top_ids = unpack(INT32, f"{name}.top_token_ids", message.top_token_ids)
    top_logprobs = unpack(FLOAT32, f"{name}.top_logprobs", message.top_logprobs)
    sums = (len(counts), sum(counts), len(num_tops), sum(num_tops), len(top_logprobs))
    wanted = (num_choices, len(logprobs), len(logprobs), len(top_ids), len(top_ids))
    if sums != wanted or min(*counts, *num_tops, 0) < 0:
        raise ValueError(
            f"{name}: num_entries has {sums[0]} values that sum to {sums[1]}, num_tops {sums[2]} "
            f"that sum to {sums[3]}, top_logprobs {sums[4]}: must be {wanted}"
        )
    entries = [
        TokenLogprobs(
            logprob, tuple(top_ids[end - count : end]), tuple(top_logprobs[end - count : end])
        )
        for logprob, count, end in zip(logprobs, num_tops, accumulate(num_tops), strict=True)
    ]
    ends = accumulate(counts)
    return [tuple(entries[end - count : end]) for count, end in zip(counts, ends, strict=True)]
