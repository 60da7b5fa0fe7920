"""The attention function that transformers' models call, and what they may ask of it.

A forward pass carries its own `AttentionPass` as a keyword down to every attention call: a probe
at load, which learns the calls, or a step, which runs them on the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from workers.attention.base import AttentionBackend, AttentionMetadata
from workers.errors import ModelError
from workers.kv_cache import LayerCache

NAME = "lockstep"
# Keywords that some models pass on and that say nothing about who sees whom.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "layer_idx"})

MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Stands for the mask tensor.

    A model that computes attention itself fails on it, where a missing mask would silently make
    it see the future.
    """

    sees: MaskFunction  # (batch, head, query position, key position) -> bool


@dataclass(frozen=True, slots=True)
class Settings:
    """The keywords of one attention call."""

    scaling: float | None
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention function in a forward pass, on this rank."""

    module: nn.Module
    settings: Settings
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int  # tokens a query sees, itself included; 0: all before it
    softcap: float  # 0: none


class AttentionPass(Protocol):
    """One forward pass's attention calls."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        settings: Settings,
        others: dict[str, object],
    ) -> torch.Tensor:
        """Query [1, Hq, T, K], key [1, H, T, K], value [1, H, T, V] -> [1, T, Hq, V]."""
        ...


def register() -> None:
    """Makes the function known to transformers under NAME."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(*, mask_function: MaskFunction, **_: object) -> MaskRule:
    """What transformers calls to build a mask."""
    return MaskRule(mask_function)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    lockstep: AttentionPass | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for attention; `lockstep` is our keyword of the model call."""
    if lockstep is None:
        raise ModelError(f"{type(module).__name__} doesn't hand keywords on to attention")
    if s_aux is not None:
        raise ModelError(f"{type(module).__name__} has attention sinks, which aren't built")
    if dropout:
        raise ModelError(f"{type(module).__name__} asks for attention dropout={dropout}: must be 0")
    settings = Settings(scaling, sliding_window, softcap)
    return lockstep.attend(module, query, key, value, attention_mask, settings, others), None


class ProbePass:
    """A dry run that writes down the calls, and answers as if each token saw itself alone."""

    def __init__(self, max_positions: int) -> None:
        self.calls: list[AttentionCall] = []
        self.inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # query, key, value
        self._max_positions = max_positions
        self._windows: dict[int, tuple[MaskRule, int]] = {}  # by the rule's id; keeps it alive

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        settings: Settings,
        others: dict[str, object],
    ) -> torch.Tensor:
        """Raises ModelError: the call asks for something that isn't built."""
        kind = type(module).__name__
        unknown = sorted(k for k, v in others.items() if v is not None and k not in HARMLESS)
        if unknown:
            raise ModelError(f"{kind} passes {', '.join(unknown)} to attention: that isn't built")
        if not isinstance(mask, MaskRule):
            raise ModelError(f"{kind} brings a mask of its own: only causal masks are built")
        self.calls.append(
            AttentionCall(
                module=module,
                settings=settings,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                k_dim=key.shape[3],
                v_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if settings.scaling is None else settings.scaling,
                window=self._window(kind, mask, settings.sliding_window, query.device),
                softcap=settings.softcap or 0.0,
            )
        )
        self.inputs.append((query, key, value))
        shared_by = query.shape[1] // value.shape[1]
        return value.repeat_interleave(shared_by, dim=1).transpose(1, 2).contiguous()

    def _window(self, kind: str, mask: MaskRule, keyword: int | None, device: torch.device) -> int:
        if id(mask) not in self._windows:
            self._windows[id(mask)] = mask, find_window(mask.sees, self._max_positions, device)
        window = self._windows[id(mask)][1]
        asked = keyword or 0
        if asked not in (0, window) and not (window == 0 and asked >= self._max_positions):
            raise ModelError(
                f"{kind} asks for sliding_window={keyword} but its mask has a window of {window}"
            )
        return window


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

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        settings: Settings,
        others: dict[str, object],
    ) -> torch.Tensor:
        """Raises ModelError: this isn't the call that came here in the dry run."""
        call, cache, metadata = next(self._calls, (None, None, None))
        if call is None or cache is None or metadata is None:
            raise ModelError("the forward pass calls attention more often than at load")
        if call.module is not module or call.settings != settings:
            raise ModelError(
                f"the forward pass calls attention of {type(module).__name__} in another order "
                "or with other settings than at load"
            )
        output = self._backend.attend(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cache,
            metadata,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
        )
        return output.unsqueeze(0)

    def finish(self) -> None:
        """Raises ModelError: calls are missing."""
        if next(self._calls, None) is not None:
            raise ModelError("the forward pass calls attention less often than at load")


def find_window(sees: MaskFunction, num_positions: int, device: torch.device) -> int:
    """The window of a causal mask rule over `num_positions` positions, 0 where it has none.

    Raises ModelError: the rule is neither causal nor a causal window.
    """
    keys = torch.arange(num_positions, device=device)
    zero = keys.new_zeros(())
    last = num_positions - 1

    def seen_by(query: int) -> torch.Tensor:
        return sees(zero, zero, keys.new_full((), query), keys).expand_as(keys)

    window = int(seen_by(last).sum())
    # A window starts at every position; a chunk only at its multiples, which these would show.
    near = (0, 1, 2, last // 2, window - 1, window, window + 1, 2 * window - 1, 2 * window, last)
    for query in sorted({query for query in near if 0 <= query <= last}):
        expected = (keys <= query) & (keys > query - window)
        if not bool((seen_by(query) == expected).all()):
            raise ModelError(
                "the model's attention mask is neither causal nor a causal sliding window: "
                "that isn't built"
            )
    return 0 if window == num_positions else window
