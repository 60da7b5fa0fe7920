"""Sequences as they are queued, and back."""

from typing import TYPE_CHECKING, NamedTuple

from protos import common_pb2, recording_pb2
from runtime.arrays import INT32, pack, unpack
from runtime.engine_codec import PARAM_FIELDS, decode_complete
from runtime.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from array import array

# What says nothing of texts.
REDACTED_PARAMS = ("max_tokens", "min_tokens", "ignore_eos", "n")


class Arrived(NamedTuple):
    """A sequence as it is queued. What it is made of doesn't change, what it has now may."""

    sequence: Sequence
    token_ids: "array[int]"
    num_scored_tokens: int
    forks: tuple[Sequence, ...]
    now: float

    @classmethod
    def of(cls, sequence: Sequence, now: float) -> "Arrived":
        return cls(sequence, sequence.token_ids[:], sequence.num_scored_tokens, sequence.forks, now)


def encode_arrival(arrived: Arrived, *, redact: bool) -> recording_pb2.Arrival:
    sequence = arrived.sequence
    names = REDACTED_PARAMS if redact else [field.name for field in PARAM_FIELDS]
    message = recording_pb2.Arrival(
        now=arrived.now,
        sequence_id=sequence.sequence_id,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=len(arrived.token_ids),
        params=common_pb2.SamplingParams(
            **{name: getattr(sequence.params, name) for name in names}
        ),
        priority=sequence.priority,
        deadline_s=sequence.deadline_s,
        submitted_s=sequence.submitted_s,
        is_resumed=sequence.is_resumed,
        num_scored_tokens=arrived.num_scored_tokens,
        forks=[
            recording_pb2.Fork(sequence_id=each.sequence_id, seed=0 if redact else each.seed)
            for each in arrived.forks
        ],
    )
    if not redact:
        message.token_ids = pack(INT32, arrived.token_ids)
        message.seed = sequence.seed
        message.cache_salt = sequence.cache_salt
        message.tenant = sequence.tenant
        message.bad_words.extend(
            recording_pb2.TokenIds(ids=pack(INT32, word)) for word in sequence.bad_words
        )
    return message


def decode_arrival(message: recording_pb2.Arrival) -> Sequence:
    """With its forks. Raises ValueError: an array is cut. Raises InvalidRequestError: so is params.

    Not for redacted ones.
    """
    token_ids = unpack(INT32, "token_ids", message.token_ids)
    count = message.num_prompt_tokens
    sequence = Sequence(
        message.sequence_id,
        token_ids[:count],
        params=decode_complete(message.params),
        seed=message.seed,
        cache_salt=message.cache_salt,
        priority=message.priority,
        tenant=message.tenant,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
        submitted_s=message.submitted_s,
        bad_words=tuple(tuple(unpack(INT32, "bad_words", each.ids)) for each in message.bad_words),
        is_resumed=message.is_resumed,
        output_token_ids=token_ids[count:],
    )
    sequence.num_scored_tokens = message.num_scored_tokens
    for each in message.forks:
        sequence.fork(each.sequence_id, seed=each.seed)
    return sequence
