"""`lockstep batch`: a file of requests, without a server."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from runtime.commands.common import config_option, options_of, pick, set_up_logging, verbose_option
from runtime.config import EngineConfig
from runtime.errors import UnavailableError
from runtime.frontend_config import FrontendConfig

# The options of frontends that matter without ports.
TAKEN = ("chat_template", "tool_parser", "reasoning_parser")
LEFT_OUT = {field.name for field in dataclasses.fields(FrontendConfig)} - set(TAKEN)
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@config_option
@click.argument("input_path", metavar="INPUT", type=FILE)
@click.argument("output_path", metavar="OUTPUT", type=FILE)
@click.option("--errors", type=FILE, help="File of failed lines; OUTPUT with .errors.jsonl.")
@click.option(
    "--max-concurrency",
    type=click.IntRange(min=1),
    help="Most requests at once; twice --max-num-seqs where unset.",
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
@options_of(EngineConfig)
@options_of(FrontendConfig, leave_out=LEFT_OUT)
@verbose_option
def batch(
    input_path: Path,
    output_path: Path,
    errors: Path | None,
    max_concurrency: int | None,
    quiet: bool,
    verbose: bool,
    **values: Any,
) -> None:
    """Start an engine, answer the requests in INPUT, stop.

    INPUT and OUTPUT are in the format of OpenAI's batch API, with a JSON object on each line:
    custom_id, method, url (/v1/chat/completions or /v1/completions) and body. Lines that can't be
    answered go to the errors file, with their number. Whatever ends it, the same command again does
    the rest; lines in the errors file are done, too: without that file, they are tried again.
    """
    from runtime.batch.app import run_batch

    set_up_logging(verbose=verbose)
    engine_config = pick(EngineConfig, values)
    errors = errors or output_path.with_name(f"{output_path.stem}.errors.jsonl")
    tally = run_batch(
        engine_config,
        pick(FrontendConfig, values),
        input_path,
        output_path,
        errors,
        max_concurrency=max_concurrency or 2 * engine_config.max_num_seqs,
        quiet=quiet,
    )
    told = f"{tally.num_answered} answered, {tally.num_before} were done before"
    if tally.num_errors:
        told += f", {_count(tally.num_errors, 'error')}: see {errors}"
    click.echo(f"lockstep: {told}", err=True)
    if tally.reason is not None:
        raise UnavailableError(
            f"{_count(tally.num_left, 'request')} failed ({tally.reason}): "
            "the same command again does the rest"
        )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
