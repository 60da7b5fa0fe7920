"""The tokens and the state of one request in the scheduler."""

from collections.abc import Iterable
from enum import Enum

from runtime.request import FinishReason
from runtime.sampling_params import SamplingParams


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


class Sequence:
    """Token ids known so far, and how many of them have their K and V in the cache."""

    __slots__ = (
        "finish_reason",
        "num_computed_tokens",
        "num_prompt_tokens",
        "params",
        "seed",
        "sequence_id",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: Iterable[int],
        *,
        params: SamplingParams,
        seed: int,
    ) -> None:
        self.sequence_id = sequence_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.params = params
        self.seed = seed
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def finish(self, reason: FinishReason) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.status.value}, "
            f"{self.num_computed_tokens} of {self.num_tokens} computed)"
        )
