"""`python -m benchmarks overhead`: its proxy, and its quick form, whose parts are processes."""

import json
import socket
from contextlib import closing
from pathlib import Path
from statistics import median

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks
from benchmarks.overhead.child import Child
from benchmarks.overhead.proxy import DelayedWay, Echo, run_proxy

pytestmark = [pytest.mark.cluster, pytest.mark.full]

ROUND_TRIP_S = 0.02
NUM_MESSAGES = 1000


def test_the_proxy_adds_a_round_trip_and_keeps_the_order() -> None:
    with closing(Echo()) as echo, Child(run_proxy, [echo.port]) as proxy:
        (port,) = proxy.answer()
        way = DelayedWay(proxy, direct_port=echo.port, proxied_port=port)
        way.set(ROUND_TRIP_S)
        assert ROUND_TRIP_S * 0.9 < median(way.added_s()) < ROUND_TRIP_S * 2
        sent = b"".join(number.to_bytes(4) for number in range(NUM_MESSAGES))
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            for start in range(0, len(sent), 4):
                connection.sendall(sent[start : start + 4])
            received = b""
            while len(received) < len(sent):
                received += connection.recv(1 << 16)
    assert received == sent


@pytest.mark.timeout(240)
def test_the_time_in_which_a_device_waits_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = ["overhead", "--quick", "--json", str(path)]
    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    metrics = json.loads(path.read_text())["metrics"]
    cell = "5ms_8rows_0.3ms"
    assert metrics.keys() == {
        f"{figure}_{cell}"
        for figure in (
            *(
                "idle_pct",
                "lost_pct",
                "received_pct",
                "added_ms",
                "driver_us",
                "interval_ms",
                "interval_ms_p99",
            ),
            *("sent_bytes", "sent_bytes_mean"),
        )
    }
    assert 0 <= metrics[f"idle_pct_{cell}"] < 100
    assert metrics[f"interval_ms_{cell}"] >= 5
    assert min(metrics.values()) >= 0
    left = [each for each in psutil.Process().children() if "spawn_main" in str(each.cmdline())]
    assert not left
