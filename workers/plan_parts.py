"""What whole steps and deltas have in common: scored rows, and what their queries see.

T tokens, S sequences, P scored rows.
"""

import numpy as np
import torch

from protos import worker_pb2
from workers.arrays import INT32, Int32, check_range, read_array, to_tensor
from workers.sampling_codec import MAX_LOGPROBS

_NONE = torch.zeros(0, dtype=torch.int32)
NOTHING_SCORED = {"score_index": _NONE, "score_token_ids": _NONE, "score_num_tops": _NONE}


def decode_scores(
    plan: worker_pb2.StepPlan | worker_pb2.StepDelta, num_tokens: int, vocab_size: int
) -> dict[str, torch.Tensor]:
    if not (plan.score_index or plan.score_token_ids or plan.score_num_tops):  # as in most steps
        return NOTHING_SCORED
    index = read_array("score_index", plan.score_index, INT32)
    check_range("score_index", index, 0, num_tokens)
    ids = read_array("score_token_ids", plan.score_token_ids, INT32, len(index), "score_index")
    check_range("score_token_ids", ids, 0, vocab_size)
    tops = read_array("score_num_tops", plan.score_num_tops, INT32, len(index), "score_index")
    check_range("score_num_tops", tops, 0, MAX_LOGPROBS + 1)
    return {
        "score_index": to_tensor(index),
        "score_token_ids": to_tensor(ids),
        "score_num_tops": to_tensor(tops),
    }


def first_seen(seq_lens: Int32, window: int, chunk: int) -> Int32:
    """[S] place of the first token that the step's first query sees."""
    if chunk:
        return seq_lens // chunk * chunk
    return np.maximum(seq_lens + 1 - window, 0) if window else np.zeros_like(seq_lens)
