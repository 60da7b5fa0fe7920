"""Which blocks steps read that they haven't written themselves."""

from collections.abc import Iterator

from runtime.errors import ConfigError
from runtime.recording.contents import Contents, Held
from runtime.scheduling.step_plan import BlockTables, StepPlan


class Needs:
    """The blocks that steps read before they write them."""

    def __init__(self, contents: Contents) -> None:
        self.blocks: dict[int, Held] = {}
        self._held = contents.blocks
        self._size = contents.block_size
        self._written: set[int] = set()  # from their first token on

    def add(self, plan: StepPlan, ended: set[int]) -> None:
        """Steps come in their order; what sequences that have `ended` read doesn't matter.

        Raises ConfigError: what another reads isn't known.
        """
        for source, target in plan.block_copies.tolist():
            self._read(source, plan.step_id, is_known=True)
            self._written.add(target)
        for table in plan.block_tables:
            for row, first, blocks in _rows_of(table):
                start, count = int(plan.seq_lens[row]), int(plan.query_lens[row])
                is_known = int(plan.sequence_ids[row]) not in ended
                for place, block in enumerate(blocks, first):
                    if place * self._size < start:
                        self._read(block, plan.step_id, is_known=is_known)
                    elif place * self._size < start + count:
                        self._written.add(block)

    def _read(self, block: int, step_id: int, *, is_known: bool) -> None:
        if block in self._written or block in self.blocks:
            return
        held = self._held.get(block)
        if held is not None:
            self.blocks[block] = held
        elif is_known:
            raise ConfigError(
                f"step {step_id} reads block {block}, and the recording doesn't have what it held"
            )


def _rows_of(table: BlockTables) -> Iterator[tuple[int, int, list[int]]]:
    """Each row, the place of its first block, and its blocks."""
    end = 0
    blocks = table.block_ids.tolist()
    counts, firsts = table.num_blocks.tolist(), table.first_blocks.tolist()
    for row, (count, first) in enumerate(zip(counts, firsts, strict=True)):
        start, end = end, end + count
        yield row, first, blocks[start:end]
