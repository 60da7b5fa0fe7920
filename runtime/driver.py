"""Puts an engine together from its configuration, and takes it apart again."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from runtime.cluster.epochs import Epochs
from runtime.cluster.loaded_model import LoadedModel
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.errors import ConfigError
from runtime.executor.base import Executor
from runtime.fingerprint import model_fingerprint
from runtime.generation_config import read_defaults, read_file
from runtime.grammar.compiler import GrammarCompiler
from runtime.model_files import fetch_weights, resolve_model
from runtime.model_gate import check_model
from runtime.progress import StartupProgress
from runtime.recording.encoder import Origin
from runtime.recording.recorder import RecordedExecutor, RecordedScheduler, Recorder
from runtime.recording.setup import SchedulerSetup
from runtime.recovery import NewEpoch, Recovery, Workforce
from runtime.request import ModelInfo
from runtime.sampling_params import LOCKSTEP_DEFAULTS, SamplingDefaults
from runtime.scheduling.cache_layout import CacheLayout, make_cache_layout
from runtime.scheduling.limits import QueueLimits, SchedulerLimits
from runtime.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Of the memory that is free on a rank once its weights are loaded.
DEFAULT_KV_SHARE = 0.3  # of a host's memory
DEFAULT_BLOCK_SIZE = 16  # or the least that the attention backend takes


@contextmanager
def running_engine(
    config: EngineConfig,
    *,
    quiet: bool = False,
    on_idle: Callable[[], object] = lambda: None,
    on_wait: Callable[[], object] = lambda: None,
) -> Iterator[Engine]:
    """Starts workers and engine; ends both, and all that they started, on the way out.

    On the engine's thread `on_idle` is called when nothing has run for a while, and `on_wait` in
    each step while the workers run it.
    Raises ConfigError: the model or the options can't be served. Raises WorkerError: a rank died.
    """
    with ExitStack() as stack:
        with StartupProgress(quiet=quiet) as progress:
            model_path = resolve_model(config.model, progress.message)
            defaults = resolve_defaults(config, model_path)
            check_model(config.model, Path(model_path), tp=config.tp, on_message=progress.message)
            # Last: it may take an hour, and what is refused above would have been fetched in vain.
            fetch_weights(config.model, model_path, progress.message)
            epochs = stack.enter_context(Epochs(config, model_path))
            spec = epochs.start(progress.loaded)
        layout = plan_cache(config, spec)
        model = ModelInfo(
            name=config.served_model_name or config.model,
            path=model_path,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            max_model_len=resolve_max_model_len(config, spec, layout),
            eos_token_ids=spec.eos_token_ids,
            tp_size=config.tp,
            defaults=defaults,
            fingerprint=model_fingerprint(
                Path(model_path),
                config.dtype,
                quantization=config.quantization,
                kv_cache_dtype=config.kv_cache_dtype,
                eos_token_ids=spec.eos_token_ids,
                defaults=defaults,
            ),
        )
        # Now, as it takes the interpreter for half a second: no request waits yet.
        compiler = GrammarCompiler(
            model_path, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
        setup = scheduler_setup(config, layout, model)
        with closing(compiler), _recording(config, setup, model) as recorder:
            with StartupProgress(quiet=quiet) as progress:
                epochs.allocate_cache(layout, progress.captured)
            scheduler, executor = _scheduler(setup, recorder), _executor(epochs, recorder)
            engine = Engine(
                model=model,
                scheduler=scheduler,
                executor=executor,
                compiler=compiler,
                depth=config.pipeline_depth,
                recovery=_recovery(config, epochs, recorder),
                on_idle=partial(_on_idle, scheduler, recorder, on_idle),
                on_wait=on_wait,
            )
            epochs.group.on_lost(partial(engine.lose, executor))
            _log_start(config, spec, layout, model)
            engine.start()
            if config.max_restarts:
                epochs.prepare()
            try:
                yield engine
            finally:
                engine.stop()


def _executor(epochs: Epochs, recorder: Recorder | None) -> Executor:
    executor = epochs.executor()
    return executor if recorder is None else RecordedExecutor(executor, recorder)


def _recovery(config: EngineConfig, epochs: Epochs, recorder: Recorder | None) -> Recovery | None:
    def restart() -> NewEpoch:
        epochs.restart()
        epochs.prepare()
        return NewEpoch(_executor(epochs, recorder), epochs.group.on_lost)

    if config.max_restarts == 0:
        return None
    return Recovery(Workforce(epochs.find_cause, restart), max_restarts=config.max_restarts)


def _log_start(
    config: EngineConfig, spec: LoadedModel, layout: CacheLayout, model: ModelInfo
) -> None:
    logger.info(
        "%s of %d bytes on %d ranks, attention %s, %d blocks of %d tokens in %d cache groups, "
        "max_model_len %d",
        spec.architecture,
        spec.parameter_bytes,
        config.tp,
        spec.attention,
        layout.num_blocks,
        layout.block_size,
        len(layout.groups),
        model.max_model_len,
    )


def make_scheduler(config: EngineConfig, layout: CacheLayout, model: ModelInfo) -> Scheduler:
    """The scheduler that the options ask for, over an empty cache."""
    return _scheduler(scheduler_setup(config, layout, model), None)


def _scheduler(setup: SchedulerSetup, recorder: Recorder | None) -> Scheduler:
    parts = setup.parts()
    if recorder is not None:
        return RecordedScheduler(parts, recorder)
    return Scheduler(
        parts.cache, policy=parts.policy, limits=parts.limits, eos_token_ids=parts.eos_token_ids
    )


def _on_idle(
    scheduler: Scheduler, recorder: Recorder | None, on_idle: Callable[[], object]
) -> None:
    if recorder is not None:
        recorder.idle(scheduler)
    on_idle()


def scheduler_setup(config: EngineConfig, layout: CacheLayout, model: ModelInfo) -> SchedulerSetup:
    return SchedulerSetup(
        layout=layout,
        limits=SchedulerLimits(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=model.max_model_len,
            watermark=config.watermark,
            max_num_partial_prefills=config.max_num_partial_prefills,
            max_chunk_tokens=config.max_chunk_tokens,
            max_num_scored_tokens=config.max_num_scored_tokens,
            queue=QueueLimits(
                max_queued_requests=config.max_queued_requests,
                max_queued_tokens=config.max_queued_tokens,
                queue_timeout_s=config.queue_timeout_s,
            ),
        ),
        policy=config.policy,
        priority_ageing_s=config.priority_ageing_s,
        prefix_cache=config.prefix_cache,
        root=secrets.token_bytes(32),
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
    )


@contextmanager
def _recording(
    config: EngineConfig, setup: SchedulerSetup, model: ModelInfo
) -> Iterator[Recorder | None]:
    """What the options want written down; None: nothing."""
    if config.record is None:
        yield None
        return
    unix_s = time.time()
    origin = Origin(
        run=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(unix_s))}-{os.getpid()}",
        setup=setup,
        model=model.name,
        fingerprint=model.fingerprint,
        depth=config.pipeline_depth,
        options={name: str(value) for name, value in asdict(config).items()},
        unix_s=unix_s,
        clock_s=time.monotonic(),
        redact=config.record_redact,
        steps=config.record_steps,
    )
    try:
        recorder = Recorder(Path(config.record), origin, max_bytes=config.record_max_bytes)
    except OSError as error:
        raise ConfigError(f"record={config.record} can't be written: {error}") from error
    with closing(recorder):
        yield recorder


def resolve_defaults(config: EngineConfig, model_path: str) -> SamplingDefaults:
    """Of what requests leave unset. Raises ConfigError: the model's can't be used or read."""
    is_ignored = config.generation_config == "ignore"
    if is_ignored:
        read_file(Path(model_path))  # workers will
    defaults = LOCKSTEP_DEFAULTS if is_ignored else read_defaults(Path(model_path))
    logger.info(
        "where requests leave them unset, generation_config %s: %s",
        config.generation_config,
        ", ".join(f"{name}={value}" for name, value in asdict(defaults).items()),
    )
    return defaults


def plan_cache(config: EngineConfig, spec: LoadedModel) -> CacheLayout:
    """Sizes the KV cache.

    Raises ConfigError: it is more than there is, or too little for one sequence.
    """
    multiple = spec.block_size_multiple
    block_size = config.block_size or -(-DEFAULT_BLOCK_SIZE // multiple) * multiple
    if block_size % multiple:
        raise ConfigError(
            f"block_size={block_size} must be a multiple of {multiple}: "
            f"the {spec.attention} attention backend takes no other; set --block-size, or another "
            "--attention"
        )
    available = spec.available_memory_bytes
    # A GPU is this engine's, and its fraction was taken already; a host has other things to do.
    share = 1.0 if config.device == "cuda" else DEFAULT_KV_SHARE
    if config.kv_memory is not None and config.kv_memory > available:
        raise ConfigError(
            f"kv_memory={config.kv_memory} bytes is more than the {available} bytes that are free "
            "on a rank: set --kv-memory to less"
        )
    max_model_len = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    return make_cache_layout(
        spec.layers,
        block_size=block_size,
        memory_bytes=config.kv_memory or int(share * available),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_chunk_tokens=config.max_chunk_tokens,
    )


def resolve_max_model_len(config: EngineConfig, spec: LoadedModel, layout: CacheLayout) -> int:
    """The longest sequence that both the model's positions and the cache reach.

    Raises ConfigError: the configuration asks for more.
    """
    if spec.max_model_len < 2:
        raise ConfigError(
            f"the model's positions reach {spec.max_model_len} token: a prompt and an output "
            "token need 2"
        )
    wanted = config.max_model_len
    if wanted is None:
        reachable = min(spec.max_model_len, layout.max_sequence_tokens)
        if reachable < spec.max_model_len:
            logger.info(
                "max_model_len is %d, what the cache holds, not the model's %d: "
                "set --kv-memory to more",
                reachable,
                spec.max_model_len,
            )
        return reachable
    if wanted > spec.max_model_len:
        raise ConfigError(
            f"max_model_len={wanted} is more than the model's positions: {spec.max_model_len}"
        )
    if wanted > layout.max_sequence_tokens:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {layout.max_sequence_tokens} tokens that the "
            "KV cache holds: set --kv-memory to more or --max-model-len to less"
        )
    return wanted
