"""What is measured: plain data, the same for our scheduler and for a peer's."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

VOCAB_SIZE = 32_000
NUM_BLOCKS = 48_000
STEP_TOKENS = 8192  # the budget of a step while prompts are computed
WINDOW = 512
NUM_WINDOW_GROUPS = 5  # beside one of full attention, as in Gemma 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """Steps in which `running` sequences feed one token each and `waiting` ones have no seat.

    Prompts have `context + i % block_size` tokens, so that in each step about as many rows cross
    the edge of a block.
    """

    running: int
    waiting: int
    prefix_cache: bool
    block_size: int
    context: int
    hybrid: bool = False  # cache groups as in Gemma 3, instead of one of full attention
    num_steps: int = 256
    num_warm_up_steps: int = 32

    @property
    def name(self) -> str:
        """The metric's name without its quantity."""
        return (
            f"{self.running}_running_{self.waiting}_waiting"
            + "_hybrid" * self.hybrid
            + "_no_prefix_cache" * (not self.prefix_cache)
        )

    @property
    def num_blocks(self) -> int:
        """Blocks enough for all that runs, of all groups."""
        tokens = self.context + self.num_steps + self.num_warm_up_steps + 2 * self.block_size + 64
        groups = 1 + NUM_WINDOW_GROUPS * self.hybrid
        return max(NUM_BLOCKS, groups * self.running * -(-tokens // self.block_size) * 11 // 10)


Hits = Literal["off", "none", "evicting", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitCase:
    """Steps that admit `num_prompts` prompts, all of which are aborted after the step.

    `hits`: the prefix cache is off; it knows none of the prompts; none, and each new block evicts
    another; it knows all of them.
    """

    hits: Hits
    block_size: int
    num_prompts: int = 32
    prompt_len: int = 512
    num_rounds: int = 40
    num_warm_up_rounds: int = 3

    @property
    def name(self) -> str:
        size = f"{self.num_prompts}x{self.prompt_len}_us"
        endings = {"off": "_no_prefix_cache", "none": "", "evicting": "_evicting", "all": "_hits"}
        return size + endings[self.hits]

    @property
    def num_blocks(self) -> int:
        """At `evicting`, hardly more than what one round needs."""
        per_round = self.num_prompts * -(-self.prompt_len // self.block_size)
        return per_round * 9 // 8 if self.hits == "evicting" else NUM_BLOCKS


Case = DecodeCase | AdmitCase


def to_json(case: Case) -> dict[str, Any]:
    """For a peer, which can't import this."""
    kind = "decode" if isinstance(case, DecodeCase) else "admit"
    return {
        "kind": kind,
        "num_blocks": case.num_blocks,
        "vocab_size": VOCAB_SIZE,
        "step_tokens": STEP_TOKENS,
        **asdict(case),
    }


def cache_pair(case: DecodeCase) -> tuple[DecodeCase, DecodeCase]:
    """The case with the prefix cache and without it."""
    return replace(case, prefix_cache=True), replace(case, prefix_cache=False)
