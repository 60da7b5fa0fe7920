"""`lockstep serve`: an engine and its frontends."""

from typing import Any

import click

from runtime.commands.common import config_option, options_of, pick, set_up_logging, verbose_option
from runtime.config import EngineConfig
from runtime.frontend_config import FrontendConfig, ServeConfig

# Options of engines and of frontends.
BOTH_HAVE = ("cluster_certs",)


@click.command()
@config_option
@options_of(EngineConfig)
@options_of(FrontendConfig, leave_out=BOTH_HAVE)
@options_of(ServeConfig)
@verbose_option
def serve(verbose: bool, **values: Any) -> None:
    """Start an engine and frontends, and serve until SIGTERM or Ctrl-C.

    SIGTERM lets requests that run finish, for --drain-timeout-s; Ctrl-C, or a second SIGTERM,
    ends them.
    """
    from runtime.app import serve as serve_app

    frontend_config = pick(FrontendConfig, values)
    set_up_logging(verbose=verbose, log_format=frontend_config.log_format)
    ended = serve_app(
        pick(EngineConfig, values), frontend_config, pick(ServeConfig, values), verbose=verbose
    )
    if ended is not None:
        raise ended
