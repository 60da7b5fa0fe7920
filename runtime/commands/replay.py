"""`lockstep replay`: what was recorded, once more."""

from pathlib import Path
from typing import Any

import click

from runtime.commands.common import set_up_logging, verbose_option
from runtime.errors import ConfigError, LockstepError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--run", help="Which of the recordings in FOLDER; the latest where unset.")
@click.option("--scheduler", "scheduler_only", is_flag=True, help="Decide every step again.")
@click.option("--model", help="Run the steps again on this model: a folder, or a hub id.")
@click.option("--from-step", type=click.IntRange(min=1), help="First step to run; the first.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps to run; all that there are.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Number format of weights and cache; auto is the checkpoint's.",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where the ranks compute."
)
@verbose_option
def replay(
    folder: Path,
    run: str | None,
    scheduler_only: bool,
    model: str | None,
    verbose: bool,
    **options: Any,
) -> None:
    """Do again what the recording in FOLDER has, which `--record` has made.

    With --scheduler the scheduler gets the same arrivals, aborts, times and results again, and its
    plans are compared with those recorded: no weights, no workers. With --model the steps of a
    recording with --record-steps run again, and their tokens are compared: from any step on, as
    what the cache held then is computed first, in other batches than it was: in bfloat16 and
    float16 tokens that are about as probable may so change places, in float32 they don't. The first
    difference is told, with exit code 1.
    """
    set_up_logging(verbose=verbose)
    if scheduler_only == (model is not None):
        raise ConfigError("either --scheduler or --model must be given: what is to be replayed")
    if scheduler_only:
        _replay_scheduler(folder, run)
    else:
        assert model is not None
        _replay_model(folder, run, model, options)


def _replay_scheduler(folder: Path, run: str | None) -> None:
    # Here, not above: `lockstep --help` needs nothing of it.
    from runtime.recording.reader import open_recording
    from runtime.recording.replay import replay_scheduler

    recording = open_recording(folder, run)
    start = recording.scheduler_start()
    verdict = replay_scheduler(recording.records(start))
    click.echo(
        f"lockstep: run {recording.header.run} from {start.name} on: {verdict.num_steps} steps are "
        "planned as recorded"
    )
    if recording.damage is not None:
        click.echo(f"lockstep: {recording.damage}", err=True)
    if verdict.difference is not None:
        raise LockstepError(f"the first that differs: {verdict.difference}")


def _replay_model(folder: Path, run: str | None, model: str, options: dict[str, Any]) -> None:
    from runtime.config import EngineConfig
    from runtime.model_replay import replay_model
    from runtime.recording.reader import open_recording

    recording = open_recording(folder, run)
    first_step, num_steps = options.pop("from_step"), options.pop("steps")
    config = EngineConfig(model=model, launcher="local", pipeline_depth=1, **options)
    verdict = replay_model(recording, config, first_step=first_step, num_steps=num_steps)
    click.echo(
        f"lockstep: run {recording.header.run}: {verdict.num_steps} steps, "
        f"{verdict.num_tokens} tokens as recorded, on {verdict.num_blocks} blocks "
        f"after {verdict.num_prefilled} tokens that the cache had"
    )
    if verdict.difference is not None:
        raise LockstepError(f"the first that differs: {verdict.difference}")
