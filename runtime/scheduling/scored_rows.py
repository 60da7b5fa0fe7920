"""Which tokens of prompts a step tells the logprobs of."""

from collections.abc import Iterable

import numpy as np

from runtime.scheduling.output import ScheduledSequence
from runtime.scheduling.sampler_inputs import Int32


def find_scored(parts: Iterable[tuple[ScheduledSequence, int]]) -> dict[str, Int32]:
    """Which rows of T are scored, for which token, with how many others.

    Each part comes with its first row.
    """
    index: list[int] = []
    token_ids: list[int] = []
    num_tops: list[int] = []
    for part, first in parts:
        scored = part.scored
        if scored:
            start = first - part.num_computed_tokens
            index.extend(range(scored.start + start, scored.stop + start))
            token_ids.extend(part.sequence.token_ids[scored.start + 1 : scored.stop + 1])
            num_tops.extend([part.sequence.params.prompt_logprobs or 0] * len(scored))
    return {
        "score_index": np.array(index, np.int32),
        "score_token_ids": np.array(token_ids, np.int32),
        "score_num_tops": np.array(num_tops, np.int32),
    }
