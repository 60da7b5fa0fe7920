"""Which interface a rank takes, of those that its host has."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from workers.errors import NetworkError
from workers.interface import choose_interface, nccl_setting

pytestmark = pytest.mark.unit

HOST = "192.0.2.7"


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def four(address: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET, address=address)

    def six(address: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET6, address=address)

    there = {
        "lo": [four("127.0.0.1"), six("::1")],
        "docker0": [four("172.17.0.1")],
        "eth0": [four("203.0.113.7"), six("fe80::1%eth0"), six("2001:db8::7")],
        "eth1": [four(HOST)],
        "ib0": [],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)


@pytest.mark.parametrize(
    ("host", "wanted", "device", "environment", "found"),
    [
        (HOST, "", "cpu", {}, ("eth1", HOST)),
        (HOST, "", "cpu", {"NCCL_SOCKET_IFNAME": "eth0"}, ("eth1", HOST)),
        (HOST, "", "cpu", {"GLOO_SOCKET_IFNAME": "eth0"}, ("eth0", "203.0.113.7")),
        (HOST, "eth1", "cpu", {"GLOO_SOCKET_IFNAME": "eth0"}, ("eth1", HOST)),
        (HOST, "", "cuda", {"NCCL_SOCKET_IFNAME": "ib,eth"}, ("eth0", "203.0.113.7")),
        (HOST, "", "cuda", {"NCCL_SOCKET_IFNAME": "=eth1"}, ("eth1", HOST)),
        (HOST, "", "cuda", {"NCCL_SOCKET_IFNAME": "^lo,docker"}, ("eth0", "203.0.113.7")),
        ("2001:db8::7", "", "cpu", {}, ("eth0", "2001:db8::7")),
        ("::1", "eth0", "cpu", {}, ("eth0", "fe80::1")),
        ("127.0.0.1", "", "cpu", {}, ("lo", "127.0.0.1")),
    ],
)
def test_an_interface_is_that_of_the_option_the_environment_or_the_host(
    host: str, wanted: str, device: str, environment: dict[str, str], found: tuple[str, str]
) -> None:
    assert choose_interface(host, wanted=wanted, device=device, environment=environment) == found


@pytest.mark.parametrize(
    ("host", "wanted", "environment", "message"),
    [
        (HOST, "eth9", {}, r"interface=eth9 isn't on host 192\.0\.2\.7; .*eth0 \(203\.0\.113\.7\)"),
        (HOST, "", {"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME=eth isn't on host"),
        ("192.0.2.8", "", {}, r"host 192\.0\.2\.8 has no interface .*: name one \(interface\)"),
        ("::2", "eth1", {}, r"interface=eth1 isn't on host ::2; in that family it has: lo \(::1\)"),
    ],
)
def test_an_interface_that_is_not_there_is_refused(
    host: str, wanted: str, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(NetworkError, match=message):
        choose_interface(host, wanted=wanted, device="cpu", environment=environment)


def test_nccl_keeps_a_setting_that_allows_the_interface() -> None:
    assert nccl_setting("eth1", {}) == "=eth1"
    assert nccl_setting("eth1", {"NCCL_SOCKET_IFNAME": "eth"}) == "eth"
    assert nccl_setting("eth1", {"NCCL_SOCKET_IFNAME": "^eth"}) == "=eth1"
    assert nccl_setting("eth1", {"NCCL_SOCKET_IFNAME": "^=eth"}) == "^=eth"
