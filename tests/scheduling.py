"""Builders of scheduling objects, and the oracle: a fake model that reads through block tables."""

import hashlib
from collections.abc import Sequence as Ids

import numpy as np

from runtime.sampling_params import SamplingParams
from runtime.scheduling.cache_layout import CacheGroup, CacheLayout
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import StepPlan, StepResult

VOCAB_SIZE = 997
EOS = 0


def make_layout(*, num_blocks: int = 64, block_size: int = 4, num_groups: int = 1) -> CacheLayout:
    groups = tuple(CacheGroup(layers=(index,), window=0) for index in range(num_groups))
    return CacheLayout(block_size=block_size, num_blocks=num_blocks, groups=groups, block_bytes=1)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    num_groups: int = 1,
    max_num_batched_tokens: int = 32,
    max_num_seqs: int = 8,
    watermark: float = 0.0,
    max_model_len: int = 1 << 20,
) -> Scheduler:
    layout = make_layout(num_blocks=num_blocks, block_size=block_size, num_groups=num_groups)
    return Scheduler(
        CacheManager(layout),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
        max_model_len=min(max_model_len, layout.max_sequence_tokens),
        eos_token_ids={EOS},
    )


def make_sequence(
    sequence_id: int,
    prompt: Ids[int],
    *,
    max_tokens: int = 8,
    seed: int = 0,
    ignore_eos: bool = False,
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Sequence(sequence_id, prompt, params=params, seed=seed)


def oracle_token(tokens: Ids[int], seed: int) -> int:
    """The token that the oracle puts after `tokens`: a function of all of them and the seed."""
    digest = hashlib.sha256(np.array([seed, *tokens], np.uint64).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def oracle_continuation(
    prompt: Ids[int], *, max_tokens: int, seed: int = 0, ignore_eos: bool = False
) -> list[int]:
    """What a request must get, computed without any of our machinery."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(oracle_token(tokens, seed))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class OracleExecutor:
    """An executor whose cache keeps token ids, and whose next token hashes what it reads there.

    A wrong table, a block handed out twice, a wrong position or a token that was never computed
    changes the output.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.cache = np.full((layout.num_blocks, layout.block_size), -1, np.int64)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        tables = [self._split(table.num_blocks, table.block_ids) for table in plan.block_tables]
        self._write(plan, tables)
        tokens: dict[int, tuple[int, ...]] = {}
        for row, index in zip(plan.sample_index, plan.sample_sequence, strict=True):
            length = int(plan.positions[row]) + 1
            views = {tuple(self._read(table[index], length)) for table in tables}
            assert len(views) == 1, "the cache groups disagree"
            seed = int(plan.sampling.seed[index])
            tokens[int(plan.sequence_ids[index])] = (oracle_token(views.pop(), seed),)
        return StepResult(step_id=plan.step_id, token_ids=tokens)

    def close(self) -> None:
        pass

    def restart(self) -> None:
        """Loses the cache, as new workers do."""
        self.cache[:] = -1

    def _write(self, plan: StepPlan, tables: list[list[np.ndarray]]) -> None:
        row = 0
        for index, count in enumerate(plan.query_lens):
            assert plan.positions[row] == plan.seq_lens[index]
            for _ in range(count):
                position = plan.positions[row]
                block, offset = divmod(int(position), self.layout.block_size)
                for table in tables:
                    self.cache[table[index][block], offset] = plan.input_ids[row]
                row += 1
        assert row == len(plan.input_ids)

    def _read(self, table: np.ndarray, length: int) -> list[int]:
        return self.cache[table].reshape(-1)[:length].tolist()

    @staticmethod
    def _split(num_blocks: np.ndarray, block_ids: np.ndarray) -> list[np.ndarray]:
        return np.split(block_ids, np.cumsum(num_blocks)[:-1])
