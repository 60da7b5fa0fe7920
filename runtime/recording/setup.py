"""What a scheduler is made of, so that the same one can be made again."""

from dataclasses import dataclass
from typing import NamedTuple

from protos import recording_pb2
from runtime.errors import ConfigError
from runtime.scheduling.cache_layout import CacheGroup, CacheLayout
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.limits import QueueLimits, SchedulerLimits
from runtime.scheduling.policy import FairPolicy, FcfsPolicy, Policy, PriorityPolicy


class SchedulerParts(NamedTuple):
    """The arguments of Scheduler."""

    cache: CacheManager
    policy: Policy
    limits: SchedulerLimits
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """Two schedulers of the same setup decide alike. `root` is the prefix cache's secret."""

    layout: CacheLayout
    limits: SchedulerLimits
    policy: str
    priority_ageing_s: float
    prefix_cache: bool
    root: bytes
    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def parts(self) -> SchedulerParts:
        """New ones, over an empty cache. Raises ConfigError: there is no such policy."""
        return SchedulerParts(
            CacheManager(self.layout, prefix_cache=self.prefix_cache, root=self.root),
            make_policy(self.policy, ageing_s=self.priority_ageing_s),
            self.limits,
            self.eos_token_ids,
        )


def make_policy(name: str, *, ageing_s: float) -> Policy:
    """Raises ConfigError: there is no policy of this name."""
    match name:
        case "fcfs":
            return FcfsPolicy()
        case "priority":
            return PriorityPolicy(ageing_s=ageing_s)
        case "fair":
            return FairPolicy()
        case _:
            raise ConfigError(f"policy={name!r} must be fcfs, priority or fair")


def encode_setup(setup: SchedulerSetup, *, redact: bool) -> recording_pb2.SchedulerSetup:
    """Without the secret where it is to be redacted."""
    layout, limits, queue = setup.layout, setup.limits, setup.limits.queue
    return recording_pb2.SchedulerSetup(
        block_size=layout.block_size,
        num_blocks=layout.num_blocks,
        block_bytes=layout.block_bytes,
        groups=[
            recording_pb2.CacheGroup(
                layers=each.layers,
                window=each.window,
                chunk=each.chunk,
                max_blocks=each.max_blocks,
            )
            for each in layout.groups
        ],
        policy=setup.policy,
        priority_ageing_s=setup.priority_ageing_s,
        prefix_cache=setup.prefix_cache,
        root=b"" if redact else setup.root,
        eos_token_ids=setup.eos_token_ids,
        vocab_size=setup.vocab_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_chunk_tokens=limits.max_chunk_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        watermark=limits.watermark,
        max_num_partial_prefills=limits.max_num_partial_prefills,
        max_num_scored_tokens=limits.max_num_scored_tokens,
        max_queued_requests=queue.max_queued_requests,
        max_queued_tokens=queue.max_queued_tokens,
        queue_timeout_s=queue.queue_timeout_s,
    )


def decode_setup(message: recording_pb2.SchedulerSetup) -> SchedulerSetup:
    groups = tuple(
        CacheGroup(
            layers=tuple(each.layers),
            window=each.window,
            chunk=each.chunk,
            max_blocks=each.max_blocks if each.HasField("max_blocks") else None,
        )
        for each in message.groups
    )
    requests, tokens = message.max_queued_requests, message.max_queued_tokens
    return SchedulerSetup(
        layout=CacheLayout(
            block_size=message.block_size,
            num_blocks=message.num_blocks,
            groups=groups,
            block_bytes=message.block_bytes,
        ),
        limits=SchedulerLimits(
            max_num_batched_tokens=message.max_num_batched_tokens,
            max_chunk_tokens=message.max_chunk_tokens,
            max_num_seqs=message.max_num_seqs,
            max_model_len=message.max_model_len,
            watermark=message.watermark,
            max_num_partial_prefills=message.max_num_partial_prefills,
            max_num_scored_tokens=message.max_num_scored_tokens,
            queue=QueueLimits(
                max_queued_requests=requests if message.HasField("max_queued_requests") else None,
                max_queued_tokens=tokens if message.HasField("max_queued_tokens") else None,
                queue_timeout_s=(
                    message.queue_timeout_s if message.HasField("queue_timeout_s") else None
                ),
            ),
        ),
        policy=message.policy,
        priority_ageing_s=message.priority_ageing_s,
        prefix_cache=message.prefix_cache,
        root=message.root,
        eos_token_ids=tuple(message.eos_token_ids),
        vocab_size=message.vocab_size,
    )
