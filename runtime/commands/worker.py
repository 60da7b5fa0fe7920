"""`lockstep worker`: one rank, for a driver elsewhere."""

import os
from typing import NoReturn

import click

from runtime.child_environment import without_secrets
from runtime.commands.common import set_up_logging, verbose_option
from runtime.config import require, require_key
from runtime.credentials import cluster_server_credentials
from runtime.errors import ConfigError
from runtime.ports import check_port_is_free

ALL_ADDRESSES = ("0.0.0.0", "::", "")


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address by which the driver and the other ranks reach this worker.",
)
@click.option(
    "--port", required=True, type=click.IntRange(1, 65535), help="Port that the driver is told."
)
@click.option(
    "--cuda-device",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Index of the GPU, where the driver asks for cuda.",
)
@click.option("--cluster-certs", help="Folder with the certificates that `lockstep certs` makes.")
@verbose_option
def worker(
    host: str, port: int, cuda_device: int, cluster_certs: str | None, verbose: bool
) -> NoReturn:
    """Serve one rank to the driver that names it (`serve --launcher static --workers`).

    The token that both have comes in LOCKSTEP_WORKER_TOKEN. A worker is for one life of a driver's
    group: it ends when that has ended, with 0, or when its driver was silent for --lease-s of
    `serve`, with 1. Whatever starts it has to start it again, also after a 0.
    """
    from runtime.cluster.worker_command import TOKEN_VARIABLE, worker_command

    set_up_logging(verbose=verbose)
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: it is the token that the driver sends")
    require_key(TOKEN_VARIABLE, token)
    require(
        host not in ALL_ADDRESSES,
        f"host={host!r} would open the ranks' rendezvous, which has no password, on every network: "
        "give the address by which they reach this worker",
    )
    cluster_server_credentials(cluster_certs)
    check_port_is_free("host", host, "port", port)
    command = worker_command(
        host=host, port=port, cuda_device=cuda_device, cluster_certs=cluster_certs
    )
    # In our place: signals and the exit code are the worker's.
    os.execve(command[0], command, {**without_secrets(), TOKEN_VARIABLE: token})
