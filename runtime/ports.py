"""The public ports of frontends, before there is a frontend."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from runtime.errors import ConfigError
from runtime.frontend_config import FrontendConfig


@contextmanager
def reserved(config: FrontendConfig) -> Iterator[FrontendConfig]:
    """The config with ports that are held for our frontends, also while none listens.

    Raises ConfigError, before minutes of loading: one can't be bound.
    """
    with ExitStack() as stack:
        numbers = {}
        for name in ("port", "http_port"):
            number = getattr(config, name)
            check_port_is_free("host", config.host, name, number)
            held = stack.enter_context(closing(_reserve(config.host, number)))
            numbers[name] = held.getsockname()[1]
        yield replace(config, **numbers)


def check_port_is_free(host_name: str, host: str, port_name: str, port: int) -> None:
    """Raises ConfigError, with the options' names, where the port can't be bound."""
    try:
        with closing(socket.create_server((host, port), family=_family(host))):
            pass
    except OSError as error:
        flags = " or ".join(f"--{each.replace('_', '-')}" for each in (port_name, host_name))
        raise ConfigError(
            f"{host_name}={host} {port_name}={port} can't be bound ({error.strerror}): set {flags}"
        ) from error


def _reserve(host: str, port: int) -> socket.socket:
    """Bound, but not listening: connections go to those of our processes that listen."""
    held = socket.socket(_family(host))
    # As frontends do: connections of a server that ended a moment ago are no reason to refuse.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, port))
    return held


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
