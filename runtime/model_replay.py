"""`lockstep replay --model`: recorded steps on workers."""

import logging
from contextlib import ExitStack
from pathlib import Path

from runtime.cluster.epochs import Epochs
from runtime.config import EngineConfig
from runtime.driver import resolve_defaults
from runtime.errors import ConfigError
from runtime.fingerprint import model_fingerprint
from runtime.model_files import fetch_weights, resolve_model
from runtime.progress import StartupProgress
from runtime.recording.reader import Recording
from runtime.recording.segment import RunVerdict, read_segment, run_segment

logger = logging.getLogger(__name__)


def replay_model(
    recording: Recording,
    config: EngineConfig,
    *,
    first_step: int | None = None,
    num_steps: int | None = None,
) -> RunVerdict:
    """Runs steps of a recording on the workers of `config`.

    Raises ConfigError: the recording can't be run, or not on this model. Raises WorkerError: a rank
    died.
    """
    segment = read_segment(recording, first_step=first_step, num_steps=num_steps)
    with ExitStack() as stack:
        with StartupProgress(quiet=True) as progress:
            path = resolve_model(config.model, progress.message)
            fetch_weights(config.model, path, progress.message)
            epochs = stack.enter_context(Epochs(config, path))
            spec = epochs.start(progress.loaded)
        layers = sorted(layer for each in segment.layout.groups for layer in each.layers)
        if layers != [*range(len(spec.layers))]:
            raise ConfigError(
                f"{config.model} has {len(spec.layers)} attention calls in a forward pass, "
                f"the recorded model {len(layers)}: it is another"
            )
        fingerprint = model_fingerprint(
            Path(path),
            config.dtype,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            eos_token_ids=spec.eos_token_ids,
            defaults=resolve_defaults(config, path),
        )
        if fingerprint != recording.header.fingerprint:
            logger.warning(
                "%s isn't quite the recorded model: the fingerprints differ", config.model
            )
        epochs.allocate_cache(segment.layout)
        return run_segment(epochs.executor(), segment)
