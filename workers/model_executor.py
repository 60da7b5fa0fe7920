"""Runs steps on one rank's part of a model.

It always sees the whole step and remembers no sequence: only weights and the KV cache last.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns

import torch

from workers import kv_cache
from workers.attention.base import AttentionBackend
from workers.attention.choice import choose
from workers.batch import NO_MASKS, Batch, LateInputs
from workers.batch_check import check_batch
from workers.cached_model import CachedModel, MakeGraph
from workers.config import CacheLayout, ModelSpec, WorkerConfig
from workers.cuda_graphs import CudaGraphs, OnProgress
from workers.device import choose_device, default_threads
from workers.dry_run import measure_model
from workers.memory import CudaMemory, explaining
from workers.model_part import ModelPart
from workers.models.capture import why_not_capturable
from workers.parallel import TensorParallel
from workers.sampling.logprobs import NO_LOGPROBS
from workers.sampling.sampler import Sampled, Sampler, Samples
from workers.shared_samples import SharedSamples

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Microseconds on the host's clock; on a GPU the forward pass is only enqueued."""

    forward_us: int
    sample_us: int


class ModelExecutor:
    """One rank's model. All calls come from one thread."""

    def __init__(
        self,
        config: WorkerConfig,
        parallel: TensorParallel,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Builds and loads; `on_progress` hears (bytes read, bytes in all) of this rank's part.

        Raises ModelError: the model or its files can't be served so.
        """
        torch.set_num_threads(config.num_threads or default_threads(config.local_world_size))
        self.timings = StepTimings(0, 0)  # of the last step
        self._pending: tuple[Batch, torch.Tensor | None] | None = None  # logits to sample from
        self._parallel = parallel
        self._local_world_size = config.local_world_size
        self._collective_timeout_s = config.collective_timeout_s
        self._device = choose_device(config)
        self._shared = SharedSamples(parallel, self._device)
        with explaining("the weights", "set --tp to more, or --quantization fp8"):
            self._model = ModelPart(
                Path(config.model_path),
                random_weights=config.random_weights,
                dtype=config.dtype,
                deterministic=config.deterministic,
                quantization=config.quantization,
                device=self._device,
                parallel=parallel,
                on_progress=on_progress,
            )
        cache_dtype = kv_cache.resolve_dtype(config.kv_cache_dtype, self._model.dtype)
        self._backend = choose(
            config.attention,
            [call.shape for call in self._model.calls],
            dtype=self._model.dtype,
            device=self._device,
            deterministic=config.deterministic,
            cache_dtype=cache_dtype,
        )
        self._cached = CachedModel(
            self._model,
            self._backend,
            cache_dtype=cache_dtype,
            device=self._device,
            make_graphs=graph_maker(
                self._device, self._backend, self._model, enforce_eager=config.enforce_eager
            ),
            max_graph_rows=config.max_num_seqs,
        )
        # A checkpoint may name ids past its vocabulary.
        vocabulary = range(self._model.vocab_size)
        self._sampler = Sampler([each for each in self._model.eos_token_ids if each in vocabulary])
        if self._device.type == "cuda":
            use = measure_model(
                self._cached,
                CudaMemory(self._device),
                config,
                max_model_len=self._model.max_model_len,
                run=self._run_largest_step,
            )
            use.check()
            logger.info("memory: %s; %d bytes are left for the KV cache", use, use.left)
            available = use.left
        else:
            available = kv_cache.available_memory(self._device, self._local_world_size)
        self.spec = self._describe(available)

    def allocate_cache(
        self, layout: CacheLayout, on_progress: OnProgress = lambda captured, total: None
    ) -> int:
        """Makes the KV cache and returns its bytes; `on_progress` hears of CUDA graphs.

        Raises CacheError: it doesn't fit the memory, the model or the attention backend.
        Raises ModelError: memory doesn't suffice for the graphs.
        """
        available = kv_cache.available_memory(self._device, self._local_world_size)
        cache_bytes = self._cached.allocate(layout, available_bytes=available)
        with explaining("the CUDA graphs", "set --enforce-eager or lower --gpu-memory-fraction"):
            self._cached.capture(on_progress)
        self._parallel.limit_collectives(self._collective_timeout_s)
        return cache_bytes

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are replayed."""
        return self._cached.has_graphs

    def execute_model(self, batch: Batch) -> dict[int, int]:
        """Runs one step: sequence id -> token id, in the order of the sampled rows.

        {} where this rank doesn't sample.

        Raises StepError: the batch doesn't fit the model or its cache; nothing ran.
        """
        self._check(batch)
        self.forward(batch)
        sampled = self.sample()
        if sampled is None:
            return {}
        sequences = batch.sample_sequence.tolist()
        tokens = sampled()[0].token_ids.tolist()
        return {batch.sequence_ids[s]: token for s, token in zip(sequences, tokens, strict=True)}

    def forward(self, batch: Batch) -> torch.Tensor:
        """Runs the forward pass of a step; `sample` follows. Returns the ids it fed, [T] int32.

        They are on the device, samples of earlier steps among them. The batch was checked when it
        was decoded.

        Raises StepError: the cache isn't there; nothing ran.
        """
        start = perf_counter_ns()
        input_ids, logits = self._run(batch)
        self._pending = (batch, logits)
        self.timings = StepTimings((perf_counter_ns() - start) // 1000, 0)
        return input_ids

    @torch.inference_mode()
    def sample(self, late: LateInputs | None = None) -> Sampled | None:
        """Samples from the logits of the last forward pass, and scores.

        What it returns waits for the device, which goes on with the next step meanwhile. None where
        this rank doesn't sample; it still hears of samples that are shared.
        """
        assert self._pending is not None, "sample comes after forward"
        (batch, logits), self._pending = self._pending, None
        if not self._parallel.is_sampler:
            self._shared.share(batch, None)
            return None
        start = perf_counter_ns()
        inputs = batch.sampler_inputs if late is None else late.inputs
        masks = NO_MASKS if late is None else late.masks
        if logits is None:  # no row was asked for
            logits = torch.zeros(0, self._model.vocab_size, device=self._device)
        row = batch.sample_sequence.long()
        num_rows = len(row)
        columns = batch.sampling.take(row)
        drawn = self._sampler.draw(
            logits[:num_rows],
            batch.positions[batch.sample_index.long()].long() + 1,
            columns,
            inputs,
            masks,
        )
        self._shared.share(batch, drawn.token_ids)  # before the host waits for them
        tell = partial(self._sampler.tell, drawn, columns)
        scores = NO_LOGPROBS
        # Logprobs are of logits that the next step overwrites.
        tells_logprobs = drawn.raw is not None and bool((columns.num_logprobs >= 0).any())
        if tells_logprobs or len(batch.score_index):
            samples = tell()
            scores = self._sampler.score(
                logits[num_rows:], batch.score_token_ids.long(), batch.score_num_tops.long()
            )
            tell = partial(_known, samples)
        sample_us = (perf_counter_ns() - start) // 1000
        self.timings = StepTimings(self.timings.forward_us, sample_us)
        return lambda: (tell(), scores)

    def compute_logits(self, batch: Batch) -> torch.Tensor | None:
        """Copies blocks, then runs the forward pass.

        Logits [R + P, V] float32 of the sampled and then of the scored rows, on the sampler's rank;
        None on the others, and where there are no such rows.

        Raises StepError, as execute_model.
        """
        self._check(batch)
        return self._run(batch)[1]

    @torch.inference_mode()
    def _run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The ids that were fed, and what compute_logits returns."""
        input_ids, logits = self._cached.run(batch, partial(self._shared.resolve, batch))
        if len(logits) == 0:
            return input_ids, None
        joined = self._parallel.gather_to_sampler(logits)
        if joined is None:
            return input_ids, None
        return input_ids, joined[:, : self._model.vocab_size].float()

    def _run_largest_step(self, batch: Batch) -> None:
        self.forward(batch)
        sampled = self.sample()
        if sampled is not None:
            sampled()

    def _describe(self, available_bytes: int) -> ModelSpec:
        model = self._model
        return ModelSpec(
            architecture=type(model.module).__name__,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            layers=self._cached.layers,
            available_memory_bytes=available_bytes,
            block_size_multiple=self._backend.block_size_multiple,
            parameter_bytes=model.parameter_bytes,
            attention=self._backend.name,
        )

    def _check(self, batch: Batch) -> None:
        check_batch(
            batch,
            self._cached.layout,
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
        )


def _known(samples: Samples) -> Samples:
    return samples


def graph_maker(
    device: torch.device, backend: AttentionBackend, model: ModelPart, *, enforce_eager: bool
) -> Callable[[], MakeGraph] | None:
    """None where steps are launched kernel by kernel; on cuda the reason is logged."""
    if device.type != "cuda":
        return None
    if enforce_eager:
        reason: str | None = "enforce_eager is set"
    elif not backend.is_capturable:
        reason = f"attention backend {backend.name} reads the device on its way"
    else:
        reason = why_not_capturable(model)
    if reason is not None:
        logger.info("no CUDA graphs: %s", reason)
        return None
    return CudaGraphs
