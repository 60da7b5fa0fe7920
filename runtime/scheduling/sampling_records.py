"""The sampling parameters of the sequences that hold blocks, a row for each."""

import numpy as np
from numpy.typing import NDArray

from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import Rows, SamplingColumns

NO_LOGPROBS = -1
# What SamplingColumns has of a sequence, and whether its output must have a structure.
RECORD = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("min_length", np.int32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("num_logprobs", np.int32),
        ("has_structure", np.bool_),
    ],
    align=True,
)


class SamplingRecords:
    """Numbers that don't change while a sequence has its row."""

    def __init__(self, max_num_seqs: int) -> None:
        self._records = np.zeros(max_num_seqs, RECORD)

    def put(self, row: int, sequence: Sequence) -> None:
        params = sequence.params
        self._records[row] = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            sequence.seed,
            sequence.num_prompt_tokens + params.min_tokens if params.min_tokens else 0,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            NO_LOGPROBS if params.logprobs is None else params.logprobs,
            params.structure is not None,
        )

    def gather(self, rows: Rows) -> SamplingColumns:
        return _columns_of(self._records[rows])

    def have_structure(self, rows: Rows) -> NDArray[np.bool_]:
        """[n] of `rows` [n]."""
        flags: NDArray[np.bool_] = self._records["has_structure"][rows]
        return flags


def _columns_of(records: NDArray[np.void]) -> SamplingColumns:
    return SamplingColumns(
        temperature=records["temperature"],
        top_k=records["top_k"],
        top_p=records["top_p"],
        min_p=records["min_p"],
        seed=records["seed"],
        min_length=records["min_length"],
        presence_penalty=records["presence_penalty"],
        frequency_penalty=records["frequency_penalty"],
        repetition_penalty=records["repetition_penalty"],
        num_logprobs=records["num_logprobs"],
    )
