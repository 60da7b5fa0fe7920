"""Addresses of our own processes, as options name them."""

from runtime.errors import ConfigError


def read_addresses(name: str, text: str) -> list[str]:
    """Of HOST:PORT[,HOST:PORT]. Raises ConfigError: one is no address, or is there twice."""
    addresses = [each.strip() for each in text.split(",")]
    for each in addresses:
        host, _, port = each.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"{name}={each!r} must be HOST:PORT, with a port in [1, 65535]")
        if addresses.count(each) > 1:
            raise ConfigError(f"{name}={text!r} has {each} twice: name each of them once")
    return addresses
