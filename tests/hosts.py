"""Hosts and Ray nodes on this machine, for tests that need several."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.multinode.network import Network
from runtime.errors import ConfigError


@contextmanager
def network(num_hosts: int, *, is_split: bool = False) -> Iterator[Network]:
    """As Network; skips where namespaces aren't allowed."""
    try:
        made = Network(num_hosts, is_split=is_split)
    except ConfigError as error:
        pytest.skip(str(error))
    with made:
        yield made
