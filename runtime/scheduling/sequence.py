"""The tokens and the state of one choice of a request in the scheduler."""

from array import array
from collections.abc import Iterable
from enum import Enum

from runtime.request import FinishReason
from runtime.sampling_params import CompleteParams


class Status(Enum):
    """Where a sequence stands."""

    HELD = "held"  # a fork whose prompt is still being computed for its source
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks
    ENDING = "ending"  # holds blocks; the last token that it may have is in flight
    FINISHED = "finished"


class Sequence:
    """Token ids known so far, and how many of them have their K and V in the cache."""

    __slots__ = (
        "admitted_s",
        "arrival",
        "arrival_s",
        "bad_words",
        "block_hashes",
        "cache_salt",
        "deadline_s",
        "finish_reason",
        "fork_of",
        "forks",
        "in_flight_until",
        "is_resumed",
        "last_token_s",
        "leader",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_live_choices",
        "num_overtaken",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_resumed_tokens",
        "num_scored_tokens",
        "params",
        "priority",
        "refused_at",
        "sampler_needs",
        "seed",
        "sequence_id",
        "status",
        "submitted_s",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: Iterable[int],
        *,
        params: CompleteParams,
        seed: int,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        submitted_s: float = 0.0,
        bad_words: tuple[tuple[int, ...], ...] = (),
        is_resumed: bool = False,
        output_token_ids: Iterable[int] = (),
    ) -> None:
        """Times are of the scheduler's clock: its request came at `submitted_s`.

        `bad_words` are those of `params`. One that `is_resumed` was accepted before, here or
        elsewhere. `output_token_ids` are what there is already.
        """
        self.sequence_id = sequence_id
        # An array, not a list: the garbage collector would walk a list's millions of tokens.
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(output_token_ids)
        self.num_resumed_tokens = len(self.token_ids) - self.num_prompt_tokens
        self.is_resumed = is_resumed
        self.num_pending_tokens = 0  # sampled by steps in flight
        self.num_computed_tokens = 0  # once all steps in flight are through
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache at first admission
        self.params = params
        self.seed = seed
        self.cache_salt = cache_salt
        self.priority = priority
        self.tenant = tenant
        self.deadline_s = deadline_s
        self.submitted_s = submitted_s
        self.bad_words = bad_words
        # Of the prompt, from its second on, whose logprobs are known, or come with steps in flight.
        self.num_scored_tokens = 0
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        # Filled by the scheduler.
        self.arrival = 0  # counts sequences as they come
        self.arrival_s = 0.0  # when it was queued
        self.admitted_s: float | None = None  # of choice 0: when the first of the choices ran
        self.last_token_s: float | None = None  # the first, or the last before it wasn't steady
        self.num_live_choices = 1  # of choice 0: those of the request that haven't ended
        self.max_num_tokens = 0  # ends with LENGTH at so many
        self.num_overtaken = 0
        self.refused_at = -1  # the cache's version when its blocks were not free
        self.num_preemptions = 0
        self.in_flight_until = 0  # the last step that may have it, once it doesn't run any more
        self.sampler_needs: object = None  # kept for its forks and for when it's preempted
        self.block_hashes: list[bytes] = []  # of the first full blocks; more as they're needed
        self.fork_of: Sequence | None = None
        self.leader: Sequence | None = None  # choice 0, or the first that goes on; None: this one
        self.forks: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """Together with those that steps in flight sample."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def first_choice(self) -> "Sequence":
        """Choice 0, or the first that goes on, with what is known of the request as a whole."""
        return self.leader or self

    @property
    def awaits_scores(self) -> bool:
        """Whether logprobs of its prompt are still to be told; only those of choice 0 are.

        Until then all of it is computed: what is in the cache has no logits.
        """
        return (
            self.params.prompt_logprobs is not None
            and self.fork_of is None
            and self.num_scored_tokens < self.num_prompt_tokens - 1
        )

    def lead(self, other: "Sequence") -> None:
        """The other is a choice of the same request."""
        other.leader = self
        self.num_live_choices += 1

    def fork(self, sequence_id: int, *, seed: int) -> "Sequence":
        """Another choice for the same prompt, which will share its blocks.

        It has no tokens of its own before it is released.
        """
        other = Sequence(
            sequence_id,
            (),
            params=self.params,
            seed=seed,
            cache_salt=self.cache_salt,
            priority=self.priority,
            tenant=self.tenant,
            deadline_s=self.deadline_s,
            submitted_s=self.submitted_s,
            bad_words=self.bad_words,
            is_resumed=self.is_resumed,
        )
        other.num_prompt_tokens = self.num_prompt_tokens
        other.fork_of = self
        self.lead(other)
        other.status = Status.HELD
        self.forks += (other,)
        return other

    def release(self, block_size: int) -> None:
        """A held fork may be admitted: it takes the prompt, and the hashes of its blocks."""
        source = self.fork_of
        assert source is not None
        self.token_ids = source.token_ids[: self.num_prompt_tokens]
        self.block_hashes = source.block_hashes[: self.num_prompt_tokens // block_size]
        self.status = Status.WAITING

    def finish(self, reason: FinishReason) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.status.value}, "
            f"{self.num_computed_tokens} of {self.num_tokens} computed)"
        )
