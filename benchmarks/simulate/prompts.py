"""Token ids for simulated requests."""

from array import array

import numpy as np

from benchmarks.simulate.workload import SimulatedRequest
from runtime.request import Request
from runtime.sampling_params import LOCKSTEP_DEFAULTS, SamplingParams


class Prompts:
    """Token ids of simulated prompts: alike exactly as far as their prefixes are."""

    def __init__(self, *, vocab_size: int, longest: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        rng = np.random.default_rng(seed)
        # All prompts are cut from it, behind two tokens that say whose they are: the prefix cache
        # hashes whole prefixes, so nothing after them is ever shared.
        self._common = array("i", rng.integers(vocab_size, size=longest).tolist())
        self._prefixes: dict[str, int] = {}

    def request(self, number: int, simulated: SimulatedRequest) -> Request:
        """Request `number`, as the engine takes it; it gets exactly the tokens it asks for."""
        params = SamplingParams(max_tokens=simulated.num_output_tokens, ignore_eos=True)
        return Request(
            request_id=number,
            prompt_token_ids=self.tokens(number, simulated),
            params=params.complete(LOCKSTEP_DEFAULTS),
            seed=number,
            tenant=simulated.tenant,
            priority=simulated.priority,
        )

    def tokens(self, number: int, request: SimulatedRequest) -> "array[int]":
        tokens = array("i")
        if request.num_prefix_tokens:
            # Counted from the other end, so that no request's own tokens are a prefix's.
            place = self._prefixes.setdefault(request.prefix, len(self._prefixes))
            tokens.extend(self._cut(-1 - place, request.num_prefix_tokens))
        tokens.extend(self._cut(number, request.num_prompt_tokens - len(tokens)))
        return tokens

    def _cut(self, number: int, count: int) -> "array[int]":
        high, low = divmod(number, self._vocab_size)
        mark = array("i", (low, high % self._vocab_size))
        return (mark + self._common[: max(0, count - len(mark))])[:count]
