"""Builders of scheduling objects, and the oracle: a fake model that reads through block tables."""

import hashlib
from collections import deque
from collections.abc import Sequence as Ids
from dataclasses import replace
from typing import Any

import numpy as np

from runtime.request import TokenLogprobs
from runtime.scheduling.cache_layout import CacheGroup, CacheLayout, window_blocks
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.limits import QueueLimits, SchedulerLimits
from runtime.scheduling.policy import FcfsPolicy, Policy
from runtime.scheduling.prefix_cache import Hash, sha256_digest
from runtime.scheduling.sampler_inputs import SamplerInputs, no_inputs
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import BlockTables, Fault, StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from tests.params import complete_params

VOCAB_SIZE = 997
EOS = 0
NUM_KEPT_STEPS = 8  # whose samples a step may refer to


class Chunk(int):
    """Among windows: queries of the group see from the last multiple of so many tokens on."""


def make_layout(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    windows: Ids[int] = (0,),
    max_chunk_tokens: int = 32,
) -> CacheLayout:
    """One group for each of `windows`."""
    groups = tuple(
        CacheGroup(
            layers=(index,),
            window=0 if isinstance(window, Chunk) else window,
            chunk=window if isinstance(window, Chunk) else 0,
            max_blocks=window_blocks(window, max_chunk_tokens, block_size) if window else None,
        )
        for index, window in enumerate(windows)
    )
    return CacheLayout(block_size=block_size, num_blocks=num_blocks, groups=groups, block_bytes=1)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    windows: Ids[int] = (0,),
    max_num_batched_tokens: int = 32,
    max_num_seqs: int = 8,
    max_model_len: int = 1 << 20,
    policy: Policy | None = None,
    prefix_cache: bool = True,
    hash_fn: Hash = sha256_digest,
    queue: QueueLimits | None = None,
    **limits: Any,
) -> Scheduler:
    threshold = limits.pop("long_prefill_token_threshold", None) or max_num_batched_tokens
    max_chunk_tokens = min(threshold, max_num_batched_tokens)
    layout = make_layout(
        num_blocks=num_blocks,
        block_size=block_size,
        windows=windows,
        max_chunk_tokens=max_chunk_tokens,
    )
    return Scheduler(
        CacheManager(layout, prefix_cache=prefix_cache, root=b"test", hash_fn=hash_fn),
        policy=FcfsPolicy() if policy is None else policy,
        limits=SchedulerLimits(
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk_tokens=max_chunk_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=min(max_model_len, layout.max_sequence_tokens),
            queue=queue or QueueLimits(),
            **limits,
        ),
        eos_token_ids={EOS},
    )


def make_table(*, max_num_seqs: int, num_groups: int, **options: int) -> BatchTable:
    return BatchTable(
        max_num_seqs=max_num_seqs, num_groups=num_groups, vocab_size=VOCAB_SIZE, **options
    )


def make_sequence(
    sequence_id: int,
    prompt: Ids[int],
    *,
    max_tokens: int = 8,
    seed: int = 0,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    params: dict[str, Any] | None = None,
    **options: Any,
) -> Sequence:
    """`params` are further sampling parameters."""
    params = complete_params(
        max_tokens=max_tokens, ignore_eos=ignore_eos, min_tokens=min_tokens, **(params or {})
    )
    return Sequence(sequence_id, prompt, params=params, seed=seed, **options)


def oracle_token(tokens: Ids[int], seed: int) -> int:
    """The token that the oracle puts after `tokens`: a function of all of them and the seed."""
    return oracle_continuation(tokens, max_tokens=1, seed=seed)[0]


def _first_seen(window: int, place: int) -> int:
    """Place of the first token that the one at `place` sees."""
    if isinstance(window, Chunk):
        return place // window * window
    return max(0, place + 1 - window) if window else 0


def _cells(tokens: Ids[int], windows: Ids[int]) -> list[int]:
    """What the oracle's cache keeps for each token.

    Like K and V, it depends on all before it, as far as a token sees the one before it.
    """
    cells: list[int] = []
    for place, token in enumerate(tokens):
        before = cells[-1] if _widest_view(windows, place) < place else 0
        cells.append(_next_cell(before, token))
    return cells


def _widest_view(windows: Ids[int], place: int) -> int:
    """Place of the first token that the one at `place` sees in any group."""
    return min(_first_seen(window, place) for window in windows)


def _next_cell(cell: int, token: int) -> int:
    return (cell * 1_000_003 + token + 1) % ((1 << 61) - 1)


def _draw(cells: Ids[int], seed: int) -> int:
    digest = hashlib.sha256(np.array([seed, *cells], np.uint64).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def oracle_scores(prompt: Ids[int], *, windows: Ids[int] = (0,)) -> list[TokenLogprobs]:
    """What the oracle tells of a prompt's tokens, from the second on."""
    cells = _cells(prompt, windows)
    views = [cells[_widest_view(windows, place) : place + 1] for place in range(len(prompt) - 1)]
    return [
        TokenLogprobs(_draw(view, token), (), ())
        for view, token in zip(views, prompt[1:], strict=True)
    ]


def oracle_continuation(
    prompt: Ids[int],
    *,
    max_tokens: int,
    seed: int = 0,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    windows: Ids[int] = (0,),
) -> list[int]:
    """What a request must get, computed without any of our machinery."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        seen = _cells(tokens, windows)[_widest_view(windows, len(tokens) - 1) :]
        tokens.append(_draw(seen, seed))
        if tokens[-1] == EOS and not ignore_eos and len(tokens) - len(prompt) > min_tokens:
            break
    return tokens[len(prompt) :]


class SerialExecutor:
    """Runs each step when its result is asked for."""

    def __init__(self) -> None:
        self._steps: deque[StepPlan] = deque()
        self._late: dict[int, tuple[SamplerInputs, TokenMasks]] = {}

    def submit(self, plan: StepPlan) -> None:
        # Gathered now: later the tables are those of a later step.
        self._steps.append(replace(plan, block_tables=tuple(plan.block_tables)))

    def sample(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> None:
        assert step_id not in self._late, "it is told once"
        self._late[step_id] = inputs, masks

    def result(self) -> StepResult:
        plan = self._steps.popleft()
        if not plan.defer_sampling:
            return self.execute(plan)
        assert plan.sampler_inputs is no_inputs(), "they come later"
        inputs, masks = self._late.pop(plan.step_id)
        return self.execute(replace(plan, sampler_inputs=inputs), masks)

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        raise NotImplementedError

    def close(self) -> None:
        pass


class OracleExecutor(SerialExecutor):
    """An executor whose next token hashes what it reads in its cache, a cell for each token.

    A wrong table, a block handed out twice or of another prefix, a wrong position, a token that was
    never computed or a copy that is missing changes the output. Groups with a window or chunks see
    that much alone, and what they see must be the end of what the widest group sees.
    """

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__()
        self.layout = layout
        self.windows = [Chunk(each.chunk) if each.chunk else each.window for each in layout.groups]
        self.cache = np.full((layout.num_blocks, layout.block_size), -1, np.int64)
        self.plans: list[StepPlan] = []
        self.faulty: set[int] = set()  # ids of sequences whose logits are damaged
        self._samples: dict[int, list[int]] = {}  # by step

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        self.plans.append(plan)
        plan = self._resolve(plan)
        for source, target in plan.block_copies:
            self.cache[target] = self.cache[source]
        tables = [self._split(table) for table in plan.block_tables]
        self._write(plan, tables)
        for index, seq_len in enumerate(plan.seq_lens):
            self._view(tables, index, int(seq_len) + 1)  # what the first query sees
        token_ids = [
            _draw(
                self._view(tables, index, int(plan.positions[row]) + 1),
                int(plan.sampling.seed[index]),
            )
            for row, index in zip(plan.sample_index, plan.sample_sequence, strict=True)
        ]
        self._samples[plan.step_id] = token_ids
        self._samples.pop(plan.step_id - NUM_KEPT_STEPS, None)
        sequence_ids = plan.sequence_ids[plan.sample_sequence].tolist()
        rows = [row for row, each in enumerate(sequence_ids) if each in self.faulty]
        return StepResult(
            step_id=plan.step_id,
            sequence_ids=sequence_ids,
            token_ids=token_ids,
            faults=dict.fromkeys(rows, Fault.INVALID_LOGITS),
            scores=self._scores(plan, tables),
        )

    def restart(self) -> None:
        """Loses the cache, as new workers do."""
        self.cache[:] = -1
        self._samples.clear()

    def _resolve(self, plan: StepPlan) -> StepPlan:
        """Puts the tokens that earlier steps sampled where the plan refers to them."""
        refer = plan.token_references
        input_ids = plan.input_ids.copy()
        for row, step_id, sample in zip(refer.rows, refer.step_ids, refer.sample_rows, strict=True):
            input_ids[row] = self._samples[int(step_id)][sample]
        return replace(plan, input_ids=input_ids)

    def _write(self, plan: StepPlan, tables: list[list[tuple[int, np.ndarray]]]) -> None:
        row = 0
        for index, count in enumerate(plan.query_lens):
            assert plan.positions[row] == plan.seq_lens[index]
            for place in range(row, row + count):
                position, token = int(plan.positions[place]), int(plan.input_ids[place])
                firsts = [_first_seen(window, position) for window in self.windows]
                before = 0
                if min(firsts) < position:
                    widest = tables[firsts.index(min(firsts))]
                    before = int(self.cache[self._cell(*widest[index], position - 1)])
                for table in tables:
                    self.cache[self._cell(*table[index], position)] = _next_cell(before, token)
            row += count
        assert row == len(plan.input_ids)

    def _scores(
        self, plan: StepPlan, tables: list[list[tuple[int, np.ndarray]]]
    ) -> list[TokenLogprobs]:
        ends = np.cumsum(plan.query_lens)
        scores = []
        for row, token in zip(plan.score_index, plan.score_token_ids, strict=True):
            index = int(np.searchsorted(ends, row, side="right"))
            view = self._view(tables, index, int(plan.positions[row]) + 1)
            is_faulty = int(plan.sequence_ids[index]) in self.faulty
            score = float("nan") if is_faulty else _draw(view, int(token))
            scores.append(TokenLogprobs(score, (), ()))
        return scores

    def _cell(self, first: int, block_ids: np.ndarray, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.layout.block_size)
        assert block >= first, "what the window sees was given back"
        return int(block_ids[block - first]), offset

    def _view(
        self, tables: list[list[tuple[int, np.ndarray]]], index: int, length: int
    ) -> list[int]:
        """What the widest group sees of the first `length` tokens; the others must agree."""
        views = [
            self._read(*table[index], length, window)
            for table, window in zip(tables, self.windows, strict=True)
        ]
        widest = max(views, key=len)
        for view in views:
            assert view == widest[len(widest) - len(view) :], "the cache groups disagree"
        return widest

    def _read(self, first: int, block_ids: np.ndarray, length: int, window: int) -> list[int]:
        start = _first_seen(window, length - 1)
        offset = first * self.layout.block_size
        assert offset <= start, "what the window sees was given back"
        return self.cache[block_ids].reshape(-1)[start - offset : length - offset].tolist()

    @staticmethod
    def _split(table: BlockTables) -> list[tuple[int, np.ndarray]]:
        parts = np.split(table.block_ids, np.cumsum(table.num_blocks)[:-1])
        return list(zip(table.first_blocks.tolist(), parts, strict=True))
