"""The command line: `lockstep` and its commands."""

import sys

import click

from runtime.commands.batch import batch
from runtime.commands.certs import certs
from runtime.commands.frontend import frontend
from runtime.commands.generate import generate
from runtime.commands.hash_key import hash_key
from runtime.commands.models import models
from runtime.commands.replay import replay
from runtime.commands.serve import serve
from runtime.commands.top import top
from runtime.commands.trace import trace
from runtime.commands.worker import worker
from runtime.errors import ConfigError, LockstepError
from runtime.interrupts import interruptible

EXIT_ERROR = 1
EXIT_CONFIG = 2


@click.group(context_settings={"max_content_width": 100})
@click.version_option(package_name="lockstep-serving", prog_name="lockstep")
def cli() -> None:
    """Lockstep serves large language models."""


for command in (
    *(serve, worker, frontend, generate, batch, models),
    *(certs, hash_key, top, replay, trace),
):
    cli.add_command(command)


def main() -> None:
    """Runs a command; errors are one sentence on stderr, interruptions end all that was started."""
    try:
        with interruptible():
            cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ConfigError as error:
        click.echo(f"lockstep: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    except LockstepError as error:
        click.echo(f"lockstep: {error}", err=True)
        sys.exit(EXIT_ERROR)
