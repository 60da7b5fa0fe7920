"""The oracle as workers that are late: steps are handed over, and run when the test says."""

from collections import defaultdict, deque

import numpy as np

from runtime.scheduling.step_plan import BlockTables, StepPlan, StepResult
from tests.scheduling import OracleExecutor

Owners = dict[int, set[int]]  # of blocks: sequence ids


class DelayedOracle:
    """Runs steps in their order, any time after they were handed over.

    Asserts that nobody writes a block that another sequence has in a step that isn't acknowledged.
    """

    def __init__(self, oracle: OracleExecutor) -> None:
        self._oracle = oracle
        self._waiting: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()
        self._touched: deque[Owners] = deque()  # by steps that aren't acknowledged
        self._owners: Owners = {}  # when they were last touched

    def __len__(self) -> int:
        """Steps that aren't acknowledged."""
        return len(self._touched)

    def submit(self, plan: StepPlan) -> None:
        written = self._written(plan)
        for touched in self._touched:
            for block, owners in written.items():
                others = touched.get(block, set()) - owners
                assert not others, f"block {block} is {others}'s, and {owners} are to write it"
        touched = self._read(plan)
        self._owners |= touched
        self._touched.append(touched)
        self._waiting.append(plan)

    def work(self, num_steps: int) -> None:
        """The workers get so far."""
        for _ in range(min(num_steps, len(self._waiting))):
            self._results.append(self._oracle.execute(self._waiting.popleft()))

    def result(self) -> StepResult:
        """Of the oldest step, which is acknowledged with it."""
        if not self._results:
            self.work(1)
        self._touched.popleft()
        return self._results.popleft()

    def restart(self) -> None:
        for each in (self._waiting, self._results, self._touched):
            each.clear()
        self._oracle.restart()

    def _written(self, plan: StepPlan) -> Owners:
        size = self._oracle.layout.block_size
        owners: Owners = defaultdict(set)
        for table in plan.block_tables:
            for index, (first, blocks) in enumerate(_rows(table)):
                start = int(plan.seq_lens[index])
                end = start + int(plan.query_lens[index])
                for block in blocks[start // size - first : -(-end // size) - first]:
                    owners[block].add(int(plan.sequence_ids[index]))
        for _, target in plan.block_copies.tolist():
            assert owners[target], "a copy goes where nobody writes"
        return owners

    def _read(self, plan: StepPlan) -> Owners:
        """With what is written."""
        owners: Owners = defaultdict(set)
        for table in plan.block_tables:
            for index, (_, blocks) in enumerate(_rows(table)):
                for block in blocks:
                    owners[block].add(int(plan.sequence_ids[index]))
        for source, _ in plan.block_copies.tolist():
            owners[source] |= self._owners[source]  # who may not even be in this step
        return owners


def _rows(table: BlockTables) -> list[tuple[int, list[int]]]:
    """For each sequence the place of its first block, and its blocks."""
    parts = np.split(table.block_ids, np.cumsum(table.num_blocks)[:-1])
    firsts = table.first_blocks.tolist()
    return [(first, part.tolist()) for first, part in zip(firsts, parts, strict=True)]
