"""How a worker is started as a process of its own."""

import logging
import sys

from workers.server import TOKEN_VARIABLE

__all__ = ["TOKEN_VARIABLE", "worker_command"]


def worker_command(
    *, host: str, port: int | None = None, cuda_device: int, cluster_certs: str | None
) -> list[str]:
    """With a port it lives on its own; else its caller holds the other end of its standard input.

    The token comes by TOKEN_VARIABLE in its environment. It logs as this process does.
    """
    level = logging.getLogger("workers").getEffectiveLevel()
    # -P: a folder called `workers` in the current directory must not be taken for ours.
    return [
        *(sys.executable, "-P", "-m", "workers.server"),
        *("--host", host),
        *(() if port is None else ("--port", str(port))),
        *("--cuda-device", str(cuda_device)),
        *("--log-level", str(level)),
        *(() if cluster_certs is None else ("--cluster-certs", cluster_certs)),
    ]
