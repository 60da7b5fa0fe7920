"""`lockstep frontend`: the public ports of engines that run already."""

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import click

from runtime.addresses import read_addresses
from runtime.commands.common import config_option, options_of, pick, set_up_logging, verbose_option
from runtime.config import require_key
from runtime.errors import ConfigError
from runtime.frontend_config import FrontendConfig
from runtime.interrupts import until_signal

if TYPE_CHECKING:
    from runtime.frontend.server import Ports


@click.command()
@config_option
@click.option(
    "--engine",
    required=True,
    metavar="HOST:PORT[,HOST:PORT]",
    help="The engines' addresses; all must have the same model and the same token.",
)
@click.option(
    "--reuse-port", is_flag=True, help="Share the ports with other frontends on this host."
)
@options_of(FrontendConfig)
@verbose_option
def frontend(engine: str, reuse_port: bool, verbose: bool, **values: Any) -> None:
    """Serve clients for engines that run already (`serve` starts frontends by itself).

    The engines' token comes in LOCKSTEP_ENGINE_TOKEN. Prints a line of JSON with the ports when it
    is ready. SIGTERM lets requests that run finish, for --drain-timeout-s; Ctrl-C, or a second
    SIGTERM, ends them.
    """
    import uvloop

    config = pick(FrontendConfig, values)
    set_up_logging(verbose=verbose, log_format=config.log_format)
    token = os.environ.get("LOCKSTEP_ENGINE_TOKEN")
    if not token:
        raise ConfigError("LOCKSTEP_ENGINE_TOKEN is not set: it is the token of the engine's port")
    require_key("LOCKSTEP_ENGINE_TOKEN", token)
    if config.api_key is None and config.api_keys is None:
        raise ConfigError(
            "neither api_key nor api_keys is set: clients need a key "
            "(--api-key, LOCKSTEP_API_KEY, --api-keys)"
        )
    addresses = read_addresses("engine", engine)

    uvloop.run(serve_until_signal(config, addresses, token, reuse_port=reuse_port))


async def serve_until_signal(
    config: FrontendConfig, addresses: list[str], token: str, *, reuse_port: bool = False
) -> None:
    """SIGTERM drains a frontend that serves, and ends one that hasn't begun to."""
    from runtime.frontend.server import run_frontend

    draining = asyncio.Event()
    is_ready = False

    def on_ready(ports: "Ports") -> None:
        nonlocal is_ready
        is_ready = True
        announce(ports)

    work = asyncio.ensure_future(
        run_frontend(config, addresses, token, on_ready, reuse_port=reuse_port, draining=draining)
    )

    def drain() -> None:
        if is_ready:
            draining.set()
        else:  # there is nothing to finish, and its engine may be long in coming
            work.cancel()

    await until_signal(work, on_drain=drain)


def announce(ports: "Ports") -> None:
    print(json.dumps({"port": ports.grpc, "http_port": ports.http}), flush=True)
