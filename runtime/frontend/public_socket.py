"""The sockets that clients connect to, before anything listens at them."""

import socket

from runtime.errors import ConfigError

# Connections that wait for the event loop.
BACKLOG = 2048


def bind(host: str, port: int, *, option: str, reuse_port: bool = False) -> socket.socket:
    """A socket at the address, which doesn't listen yet; port 0 takes a free one.

    With `reuse_port` several processes share the port. Raises ConfigError, which names `option`:
    it can't be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, option) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, option) from error
    return bound


def listen(bound: socket.socket, *, option: str) -> None:
    """Here, since uvloop's servers keep to themselves that they can't.

    Raises ConfigError: another process listens at the address since it was bound.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, option) from error


def _cannot_listen(host: str, port: int, option: str) -> ConfigError:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ConfigError(
        f"can't listen at {address}: it is in use, or no address of this machine; "
        f"set {option} or --host"
    )
