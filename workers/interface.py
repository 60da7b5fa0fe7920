"""The network interface by which a rank exchanges tensors with others."""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from workers.errors import NetworkError

# By device, what torch's backends call it.
VARIABLES = {"cpu": "GLOO_SOCKET_IFNAME", "cuda": "NCCL_SOCKET_IFNAME"}

MAX_CONNECTIONS = 64


class Interface(NamedTuple):
    """One of this host's, and its address there."""

    name: str
    address: str

    def listen(self) -> socket.socket:
        """A port of this address, from the operating system."""
        return socket.create_server((self.address, 0), family=_family(self.address))


class Endpoint(NamedTuple):
    """Where another rank listens."""

    host: str
    port: int


def choose_interface(
    host: str, *, wanted: str, device: str, environment: Mapping[str, str]
) -> Interface:
    """The `wanted` one, or that of the environment's variable for `device`, or that of `host`.

    `host` is a name or an address of this host; the address chosen is of the same family. Raises
    NetworkError: there is no such interface; the message says which there are.
    """
    import psutil  # not there where only a device is checked, by `make gpu-check`

    try:
        family, *_, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise NetworkError(f"host {host} can't be resolved on itself: {error}") from error
    ours = [
        Interface(name, each.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == family
    ]
    variable = VARIABLES[device]
    named = environment.get(variable, "")
    if wanted:
        found = [each for each in ours if each.name == wanted]
        reason = f"interface={wanted} isn't on host {host}"
    elif named:
        found = [each for each in ours if _matches(each.name, named, device)]
        reason = f"{variable}={named} isn't on host {host}"
    else:
        found = [each for each in ours if each.address == address]
        reason = f"host {host} has no interface with that address: name one (interface)"
    if not found:
        there = ", ".join(f"{each.name} ({each.address})" for each in ours) or "none"
        raise NetworkError(f"{reason}; in that family it has: {there}")
    return found[0]


def find_faults(endpoints: list[Endpoint], timeout_s: float) -> list[str]:
    """Why each can't be reached within `timeout_s`, or nothing."""
    if not endpoints:
        return []
    with ThreadPoolExecutor(min(len(endpoints), MAX_CONNECTIONS), "reach") as pool:
        return list(pool.map(lambda each: _find_fault(each, timeout_s), endpoints))


def nccl_setting(interface: str, environment: Mapping[str, str]) -> str:
    """What NCCL's variable must be for it to take `interface`: what it is, where that allows it."""
    named = environment.get(VARIABLES["cuda"], "")
    return named if named and _matches(interface, named, "cuda") else f"={interface}"


def _find_fault(endpoint: Endpoint, timeout_s: float) -> str:
    try:
        socket.create_connection(endpoint, timeout_s).close()
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _matches(name: str, named: str, device: str) -> bool:
    """As the backends read their variables: gloo takes names, NCCL beginnings of names."""
    if device == "cpu":
        return name in named.split(",")
    beginnings = named.removeprefix("^").removeprefix("=").split(",")
    if named.startswith(("=", "^=")):
        return (name in beginnings) != named.startswith("^")
    return name.startswith(tuple(beginnings)) != named.startswith("^")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
