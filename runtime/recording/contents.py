"""Which tokens the blocks of the pool hold, as the plans of steps have it.

Not the scheduler's books: what plans write, whoever has made them.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from protos import recording_pb2
from runtime.arrays import INT32, UINT64, pack, unpack
from runtime.recording.arrivals import Arrived
from runtime.scheduling.step_plan import BlockTables, StepPlan

# Steps refer to samples of so many before them at most.
KEPT_STEPS = 16


class Held(NamedTuple):
    """A block holds the tokens of `text` from `place` blocks on, as far as they are there."""

    group: int
    text: "array[int]"
    place: int


@dataclass(slots=True)
class Sampled:
    """The samples of a step: whose they are, for which place of its text, and which tokens."""

    sequence_ids: list[int]
    places: list[int]
    token_ids: list[int] | None = None  # None: in flight


class Contents:
    """Follows plans and results in the order of the steps."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.texts: dict[int, array[int]] = {}  # of live sequences, by id
        self.blocks: dict[int, Held] = {}
        self.samples: dict[int, Sampled] = {}  # by step

    def add(self, arrived: Arrived) -> None:
        """A sequence and its forks are queued."""
        self.texts[arrived.sequence.sequence_id] = arrived.token_ids
        count = arrived.sequence.num_prompt_tokens
        for each in arrived.forks:
            self.texts[each.sequence_id] = arrived.token_ids[:count]

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """They have ended. What they computed may still be in blocks."""
        for each in sequence_ids:
            self.texts.pop(each, None)

    def run(self, plan: StepPlan) -> None:
        """A step is handed over."""
        for source, target in plan.block_copies.tolist():
            if source in self.blocks:
                self.blocks[target] = self.blocks[source]
        ids = plan.sequence_ids.tolist()
        starts = plan.seq_lens.tolist()
        ends = (plan.seq_lens + plan.query_lens).tolist()
        for group, table in enumerate(plan.block_tables):
            self._write(group, table, ids, starts, ends)
        self.samples[plan.step_id] = Sampled(
            [ids[row] for row in plan.sample_sequence.tolist()],
            (plan.positions[plan.sample_index] + 1).tolist(),
        )
        self.samples.pop(plan.step_id - KEPT_STEPS, None)

    def take(self, step_id: int, token_ids: list[int]) -> None:
        """What a step has sampled."""
        sampled = self.samples[step_id]
        sampled.token_ids = token_ids
        for sequence_id, place, token in zip(
            sampled.sequence_ids, sampled.places, token_ids, strict=True
        ):
            text = self.texts.get(sequence_id)
            if text is not None and place == len(text):
                text.append(token)

    def lose(self) -> None:
        """The workers have lost the cache and all steps."""
        self.blocks.clear()
        self.samples.clear()

    def encode(self) -> recording_pb2.CacheContents:
        message = recording_pb2.CacheContents()
        indices: dict[int, int] = {}  # of texts, by their identity
        owned = zip((held.text for held in self.blocks.values()), repeat(0))
        live = ((text, sequence_id) for sequence_id, text in self.texts.items())
        for text, sequence_id in (*live, *owned):
            if id(text) not in indices:
                indices[id(text)] = len(indices)
                message.texts.add(sequence_id=sequence_id, token_ids=pack(INT32, text))
        for block, held in self.blocks.items():
            message.blocks.add(
                block=block, group=held.group, text=indices[id(held.text)], place=held.place
            )
        for step_id, sampled in self.samples.items():
            tokens = sampled.token_ids
            message.samples.add(
                step_id=step_id,
                sequence_ids=pack(UINT64, sampled.sequence_ids),
                places=pack(INT32, sampled.places),
                token_ids=None if tokens is None else pack(INT32, tokens),
            )
        return message

    def _write(
        self, group: int, table: BlockTables, ids: list[int], starts: list[int], ends: list[int]
    ) -> None:
        size = self.block_size
        blocks = table.block_ids.tolist()
        shift = 0
        rows = zip(
            ids, starts, ends, table.first_blocks.tolist(), table.num_blocks.tolist(), strict=True
        )
        for sequence_id, start, end, first, count in rows:
            text = self.texts.get(sequence_id)
            for place in range(start // size, -(-end // size)):
                block = blocks[shift + place - first]
                if text is not None:
                    self.blocks[block] = Held(group, text, place)
                elif start <= place * size:  # of one that has ended: nobody will read it
                    self.blocks.pop(block, None)
            shift += count


def decode_contents(message: recording_pb2.CacheContents, block_size: int) -> Contents:
    """What `encode` was told of. Raises ValueError: an array is cut."""
    contents = Contents(block_size)
    texts = [array("i", unpack(INT32, "texts", each.token_ids)) for each in message.texts]
    for each, text in zip(message.texts, texts, strict=True):
        if each.sequence_id:
            contents.texts[each.sequence_id] = text
    for held in message.blocks:
        contents.blocks[held.block] = Held(held.group, texts[held.text], held.place)
    for step in message.samples:
        has_tokens = step.HasField("token_ids")
        contents.samples[step.step_id] = Sampled(
            unpack(UINT64, "samples", step.sequence_ids),
            unpack(INT32, "samples", step.places),
            unpack(INT32, "samples", step.token_ids) if has_tokens else None,
        )
    return contents
