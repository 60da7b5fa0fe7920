"""How long a step takes.

A step's time is the sum of

- linear layers: max(weights read / bandwidth, 2 x weights x tokens / FLOP/s). The head's weights
  meet the sampled rows alone;
- attention: max(keys and values read and written / bandwidth, 4 x heads x head dim x pairs of
  query and visible key / FLOP/s);
- sampling: `sampler_passes` passes over float32 logits, on rank 0;
- between tp > 1 ranks: an all-reduce after attention and MLP of every layer and after the
  embedding, a gather of the logits: each a latency, plus bytes over the link (a ring);
- on the host: `overhead_us`, and more for each sequence and token; nothing overlaps it.

Weights and heads are divided by tp; KV heads are replicated where there are fewer than ranks.
Not modelled: other kernels' time (norms, rotary, activations: the overheads and `flop_efficiency`
have to cover them), keys that a long chunk's query tiles read more than once, clocks that drop
under load. The defaults of the constants are estimates, not measured on these GPUs.
"""

from collections import Counter
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.simulate.hardware import Device
from benchmarks.simulate.model_shape import ModelShape
from runtime.config import require
from runtime.options import option
from runtime.scheduling.sampler_inputs import Int32

LOGIT_BYTES = 4
WHOLE = 1 << 30  # a window that nothing reaches behind


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConstants:
    """What the model assumes beside datasheets. Printed with each result."""

    bandwidth_efficiency: float = option(0.8, "Share of the memory bandwidth that is reached.")
    flop_efficiency: float = option(0.6, "Share of the FLOP/s that is reached.")
    link_efficiency: float = option(0.7, "Share of the link's bandwidth that is reached.")
    overhead_us: float = option(
        2000.0,
        "Host time and small kernels of a step whatever is in it, in microseconds: about so much "
        "with CUDA graphs, several times as much without.",
    )
    row_overhead_us: float = option(2.0, "Host time for each sequence in a step.")
    token_overhead_us: float = option(0.0, "Time for each token of a step beside linear layers.")
    sampler_passes: float = option(4.0, "How often the sampler reads the logits.")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_efficiency"):
                require(0 < value <= 1, f"{each.name}={value} must be in (0, 1]")
            else:
                require(value >= 0, f"{each.name}={value} must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of one step, by what they are spent on."""

    linear_s: float
    attention_s: float
    sampling_s: float
    collective_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        device_s = self.linear_s + self.attention_s + self.sampling_s
        return device_s + self.collective_s + self.host_s


class CostModel:
    """What steps of `shape` cost on `tp` ranks of `device`."""

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        *,
        tp: int = 1,
        constants: CostConstants | None = None,
    ) -> None:
        require(tp >= 1, f"tp={tp} must be at least 1")
        require(
            shape.num_heads % tp == 0,
            f"tp={tp} must divide the {shape.num_heads} attention heads of {shape.name}",
        )
        require(
            tp == 1 or device.link_bandwidth > 0, f"tp={tp} needs a link, {device.name} has none"
        )
        self.shape, self.device, self.tp = shape, device, tp
        self.constants = constants or CostConstants()
        self._bandwidth = device.bandwidth * self.constants.bandwidth_efficiency
        self._flops = device.flops * self.constants.flop_efficiency
        self._link = device.link_bandwidth * self.constants.link_efficiency
        # Layers of one window cost the same.
        self._windows = [(w or WHOLE, count) for w, count in Counter(shape.windows).items()]
        kv_heads = shape.kv_heads_per_rank(tp)
        self._kv_token_bytes = 2 * kv_heads * shape.head_dim * shape.element_bytes
        self._linear_params, self._head_params = shape.linear_params, shape.head_params
        self._read_s = shape.step_weight_bytes / self._bandwidth
        self._pair_flops = 4 * shape.num_heads // tp * shape.head_dim

    def step(self, seq_lens: Int32, query_lens: Int32, *, num_samples: int) -> StepCost:
        """The cost of `query_lens` [S] tokens after `seq_lens` [S] in the cache.

        `num_samples` rows are sampled.
        """
        num_tokens = int(query_lens.sum())
        return StepCost(
            linear_s=self._linear_s(num_tokens, num_samples),
            attention_s=self._attention_s(seq_lens, query_lens, num_tokens),
            sampling_s=self.constants.sampler_passes
            * num_samples
            * self.shape.vocab_size
            * LOGIT_BYTES
            / self._bandwidth,
            collective_s=self._collective_s(num_tokens, num_samples),
            host_s=self._host_s(num_tokens, len(query_lens)),
        )

    def _linear_s(self, num_tokens: int, num_samples: int) -> float:
        flops = 2 * (self._linear_params * num_tokens + self._head_params * num_samples)
        return max(self._read_s, flops / self._flops) / self.tp

    def _attention_s(self, seq_lens: Int32, query_lens: Int32, num_tokens: int) -> float:
        ends = seq_lens + query_lens
        has_chunks = num_tokens > len(query_lens)
        num_bytes = num_pairs = 0
        for window, count in self._windows:
            keys = int(np.minimum(ends, query_lens + (window - 1)).sum())
            pairs = visible_pairs(seq_lens, query_lens, window) if has_chunks else keys
            num_bytes += count * (keys + num_tokens)
            num_pairs += count * pairs
        return max(
            num_bytes * self._kv_token_bytes / self._bandwidth,
            num_pairs * self._pair_flops / self._flops,
        )

    def _host_s(self, num_tokens: int, num_rows: int) -> float:
        c = self.constants
        return 1e-6 * (
            c.overhead_us + c.row_overhead_us * num_rows + c.token_overhead_us * num_tokens
        )

    def _collective_s(self, num_tokens: int, num_samples: int) -> float:
        if self.tp == 1:
            return 0.0
        shape, others = self.shape, (self.tp - 1) / self.tp
        num_reduces = 2 * shape.num_layers + 1
        reduced = num_reduces * num_tokens * shape.hidden_size * shape.element_bytes
        gathered = num_samples * shape.vocab_size * LOGIT_BYTES
        latency_s = (num_reduces + 1) * self.device.link_latency_s
        return latency_s + others * (2 * reduced + gathered) / self._link


def visible_pairs(seq_lens: Int32, query_lens: Int32, window: int) -> int:
    """Pairs of a query and a key that it sees.

    Query i of a sequence sees min(seq_len + i + 1, window) keys.
    """
    # The first of them see everything, the rest a full window.
    queries = query_lens.astype(np.int64)
    whole = np.clip(window - seq_lens.astype(np.int64), 0, queries)
    pairs = whole * seq_lens + whole * (whole + 1) // 2 + (queries - whole) * window
    return int(pairs.sum())
