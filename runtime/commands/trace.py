"""`lockstep trace`: what a recording shows over time."""

from pathlib import Path

import click

from runtime.errors import ConfigError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--run", help="Which of the recordings in FOLDER; the latest where unset.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write to; FOLDER where unset.",
)
def trace(folder: Path, run: str | None, output: Path | None) -> None:
    """Draw the recording in FOLDER, which `--record` has made, over time.

    Writes trace.json, for Perfetto (ui.perfetto.dev) or chrome://tracing, and batch.png, what
    batches are made of.
    """
    from runtime.recording.plot import plot_batches
    from runtime.recording.reader import open_recording
    from runtime.recording.timeline import read_timeline, write_trace

    recording = open_recording(folder, run)
    timeline = read_timeline(recording.records())
    target = output or folder
    target.mkdir(parents=True, exist_ok=True)
    with (target / "trace.json").open("w", encoding="utf-8") as file:
        write_trace(timeline, file)
    told = f"run {recording.header.run}: {len(timeline.steps)} steps and {len(timeline.lives)}"
    click.echo(f"lockstep: {told} sequences in {target / 'trace.json'}")
    if recording.damage is not None:
        click.echo(f"lockstep: {recording.damage}", err=True)
    try:
        plot_batches(timeline, target / "batch.png")
    except ConfigError as error:
        click.echo(f"lockstep: no picture: {error}", err=True)
