"""Namespaces as hosts: who reaches whom, and what is left of them."""

import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.multinode.network import Network
from tests.hosts import network

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]

# Nobody listens on port 9: an error that comes back shows that the way there and back is open.
PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=1.0)
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("not reached")
"""

MAKER = """
import sys
from benchmarks.multinode.network import Network

with Network(2) as network:
    print(network.command(0, [])[1], network.command(1, [])[1], flush=True)
    sys.stdin.read()
"""


def probe(target: str, prefix: list[str]) -> str:
    command = [*prefix, sys.executable, "-I", "-c", PROBE, target]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def reaches(hosts: Network, one: int, other: int) -> bool:
    return probe(hosts.addresses[other], hosts.command(one, [])) == "reached"


def test_hosts_reach_each_other_but_for_a_cut() -> None:
    with network(3) as hosts:
        assert reaches(hosts, 0, 2)
        hosts.cut(0, 2)
        assert not reaches(hosts, 0, 2)
        assert not reaches(hosts, 2, 0)
        assert reaches(hosts, 0, 1)
        assert reaches(hosts, 1, 2)
        hosts.heal()
        assert reaches(hosts, 2, 0)
        assert probe(hosts.addresses[2], []) == "reached"


@pytest.mark.full
def test_a_second_network_leads_to_no_other_host() -> None:
    with network(2, is_split=True) as hosts:
        assert probe("203.0.113.2", hosts.command(0, [])) == "not reached"
        assert reaches(hosts, 0, 1)


TIMED = """
import socket, sys, time
started = time.perf_counter()
try:
    socket.create_connection((sys.argv[1], 9), timeout=10.0)
except ConnectionRefusedError:
    print(time.perf_counter() - started)
"""


@pytest.mark.full
def test_a_round_trip_between_hosts_takes_as_long_as_is_asked() -> None:
    with network(2, delay_s=0.1) as hosts:
        command = hosts.command(0, [sys.executable, "-I", "-c", TIMED, hosts.addresses[1]])
        timed = subprocess.run(command, capture_output=True, text=True, check=True)
        hosts.cut(0, 1)
        assert not reaches(hosts, 0, 1)

    assert float(timed.stdout) > 0.1


def test_hosts_are_gone_with_who_made_them() -> None:
    with network(1):
        """Skips where they can't be made."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as maker:
        assert maker.stdout is not None
        namespaces = maker.stdout.readline().split()
        holders = [psutil.Process(int(each.split("/")[2])) for each in namespaces]
        maker.send_signal(signal.SIGKILL)

    _, alive = psutil.wait_procs(holders, timeout=10.0)
    assert alive == []
