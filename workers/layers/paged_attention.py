"""The attention function that transformers' models call, and what they may ask of it.

Each call goes to the `AttentionPass` of the forward pass that runs: a probe at load, which learns
the calls, or a step, which runs them on the cache.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from workers.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from workers.attention.native import NativeAttention
from workers.errors import ModelError
from workers.kv_cache import LayerCache
from workers.layers.mask_rule import MaskFunction, MaskRule, Reach, find_reach

# Keywords that models pass on and that say nothing about who sees whom.
HARMLESS = frozenset(
    {
        "cache_position",
        "layer_idx",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Settings:
    """The keywords of one attention call."""

    scaling: float | None
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The heads [start, stop) that a rank keeps where all of them reach attention."""

    query: tuple[int, int]
    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What one call brings, batch 1: query [Hq, T, K], key [H, T, K], value [H, T, V]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None  # [Hq] logits that have no value

    def cut(self, heads: HeadShard | None) -> "AttentionInputs":
        """Those of this rank's heads."""
        if heads is None:
            return self
        query, key = slice(*heads.query), slice(*heads.key)
        sinks = None if self.sinks is None else self.sinks[query]
        return AttentionInputs(self.query[query], self.key[key], self.value[key], sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention function in a forward pass, on this rank."""

    module: nn.Module
    settings: Settings
    heads: HeadShard | None  # None: the model brings this rank's heads alone
    shape: AttentionShape


class PlannedCall(NamedTuple):
    """A call of a step, on its layer's cache, by our kernel."""

    call: AttentionCall
    cache: LayerCache
    metadata: AttentionMetadata
    backend: NativeAttention


class AttentionPass(Protocol):
    """One forward pass's attention calls."""

    def attend(
        self,
        module: nn.Module,
        inputs: AttentionInputs,
        mask: object,
        settings: Settings,
        others: Mapping[str, object],
    ) -> torch.Tensor:
        """Returns [T, Hq, V], the heads that this rank keeps."""
        ...

    def take(
        self, calls: Sequence[AttentionCall], dtype: torch.dtype
    ) -> Sequence[PlannedCall] | None:
        """Instead of `attend`, for a caller that runs the kernel itself; None: it can't."""
        ...


class PagedAttention:
    """The attention function of one model, under a name of its own in transformers.

    The pass isn't handed down through the model: some drop keywords on the way to attention.
    """

    def __init__(self) -> None:
        self.name = f"lockstep-{next(_numbers)}"
        self._pass: AttentionPass | None = None
        self._positions: torch.Tensor | None = None
        AttentionInterface.register(self.name, self)
        AttentionMaskInterface.register(self.name, make_mask)

    @contextmanager
    def running(self, attention: AttentionPass, positions: torch.Tensor) -> Iterator[None]:
        """Calls within go to `attention`; `positions` [1, T] are those of the forward pass."""
        self._pass, self._positions = attention, positions
        try:
            yield
        finally:
            self._pass = self._positions = None

    def positions(self) -> torch.Tensor:
        """Those of the forward pass that runs, [1, T]."""
        assert self._positions is not None, "forward passes run in `running`"
        return self._positions

    def attend(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
    ) -> torch.Tensor:
        """A call that is known by now, without sinks: [T, heads, dim] each -> [T, heads, V]."""
        assert self._pass is not None, "forward passes run in `running`"
        inputs = AttentionInputs(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), None
        )
        return self._pass.attend(call.module, inputs, mask, call.settings, {})

    def take(
        self, calls: Sequence[AttentionCall], dtype: torch.dtype
    ) -> Sequence[PlannedCall] | None:
        """What is needed to make known calls in a step; None where they are to go to `attend`."""
        assert self._pass is not None, "forward passes run in `running`"
        return self._pass.take(calls, dtype)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls: [1, heads, T, dim] each -> [1, T, heads, dim of the values]."""
        assert self._pass is not None, "forward passes run in `running`"
        if dropout:
            kind = type(module).__name__
            raise ModelError(f"{kind} asks for attention dropout={dropout}: must be 0")
        inputs = AttentionInputs(query[0], key[0], value[0], s_aux)
        settings = Settings(scaling, sliding_window, softcap)
        output = self._pass.attend(module, inputs, attention_mask, settings, others)
        return output.unsqueeze(0), None


def make_mask(*, mask_function: MaskFunction, **_: object) -> MaskRule:
    """What transformers calls to build a mask."""
    return MaskRule(mask_function)


class ProbePass:
    """A dry run that writes down the calls, and answers as if each token saw itself alone."""

    def __init__(self, max_positions: int, heads: Mapping[nn.Module, HeadShard]) -> None:
        """`heads` are those that this rank keeps of attention modules that bring all."""
        self.calls: list[AttentionCall] = []
        self.inputs: list[AttentionInputs] = []
        self._heads = heads
        self._max_positions = max_positions
        self._reaches: dict[int, tuple[MaskRule, Reach]] = {}  # by the rule's id; keeps it alive

    def attend(
        self,
        module: nn.Module,
        inputs: AttentionInputs,
        mask: object,
        settings: Settings,
        others: Mapping[str, object],
    ) -> torch.Tensor:
        """Raises ModelError: the call asks for something that isn't built."""
        kind = type(module).__name__
        unknown = sorted(k for k, v in others.items() if v is not None and k not in HARMLESS)
        if unknown:
            raise ModelError(f"{kind} passes {', '.join(unknown)} to attention: that isn't built")
        if not isinstance(mask, MaskRule):
            raise ModelError(f"{kind} brings a mask of its own: only causal masks are built")
        heads = self._heads.get(module)
        own = inputs.cut(heads)
        reach = self._reach(kind, mask, settings.sliding_window, own.query.device)
        head_dim = own.query.shape[2]
        shape = AttentionShape(
            num_heads=len(own.query),
            num_kv_heads=len(own.key),
            k_dim=own.key.shape[2],
            v_dim=own.value.shape[2],
            scale=head_dim**-0.5 if settings.scaling is None else settings.scaling,
            window=reach.window,
            chunk=reach.chunk,
            softcap=settings.softcap or 0.0,
            has_sinks=own.sinks is not None,
        )
        self.calls.append(AttentionCall(module=module, settings=settings, heads=heads, shape=shape))
        self.inputs.append(own)
        shared_by = len(own.query) // len(own.value)
        return own.value.repeat_interleave(shared_by, dim=0).transpose(0, 1).contiguous()

    def take(self, calls: Sequence[AttentionCall], dtype: torch.dtype) -> None:
        """A dry run looks at what comes."""

    def _reach(
        self, kind: str, mask: MaskRule, sliding_window: int | None, device: torch.device
    ) -> Reach:
        if id(mask) not in self._reaches:
            self._reaches[id(mask)] = mask, find_reach(mask.sees, self._max_positions, device)
        reach = self._reaches[id(mask)][1]
        asked = sliding_window or 0
        is_whole = reach == Reach() and asked >= self._max_positions
        if asked not in (0, reach.window) and not is_whole:
            raise ModelError(
                f"{kind} asks for sliding_window={sliding_window} but its mask has a window of "
                f"{reach.window}"
            )
        return reach


class StepPass:
    """One step: each call on its layer's cache."""

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        caches: Sequence[LayerCache],
        metadata: Sequence[AttentionMetadata],
        backend: AttentionBackend,
    ) -> None:
        """`caches` and `metadata` have one entry per call."""
        self._calls = iter(zip(calls, caches, metadata, strict=True))
        self._backend = backend
        self._cache_dtype = caches[0].key.dtype if caches else None

    def attend(
        self,
        module: nn.Module,
        inputs: AttentionInputs,
        mask: object,
        settings: Settings,
        others: Mapping[str, object],
    ) -> torch.Tensor:
        """Raises ModelError: this isn't the call that came here in the dry run."""
        call, cache, metadata = self._next(module, settings)
        own = inputs.cut(call.heads)
        return self._backend.attend(
            own.query.transpose(0, 1),
            own.key.transpose(0, 1),
            own.value.transpose(0, 1),
            cache,
            metadata,
            scale=call.shape.scale,
            window=call.shape.window,
            chunk=call.shape.chunk,
            softcap=call.shape.softcap,
            sinks=own.sinks,
        )

    def take(
        self, calls: Sequence[AttentionCall], dtype: torch.dtype
    ) -> Sequence[PlannedCall] | None:
        """Raises ModelError, as `attend`."""
        backend = self._backend
        if not isinstance(backend, NativeAttention) or dtype != self._cache_dtype:
            return None
        return [PlannedCall(*self._next(each.module, each.settings), backend) for each in calls]

    def _next(
        self, module: nn.Module, settings: Settings
    ) -> tuple[AttentionCall, LayerCache, AttentionMetadata]:
        planned = next(self._calls, None)
        if planned is None:
            raise ModelError("the forward pass calls attention more often than at load")
        call = planned[0]
        if call.module is not module or (
            call.settings is not settings and call.settings != settings
        ):
            raise ModelError(
                f"the forward pass calls attention of {type(module).__name__} in another order "
                "or with other settings than at load"
            )
        return planned

    def finish(self) -> None:
        """Raises ModelError: calls are missing."""
        if next(self._calls, None) is not None:
            raise ModelError("the forward pass calls attention less often than at load")
