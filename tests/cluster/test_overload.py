"""Ten times what a server can do, for a while: `python -m benchmarks overload`, and its finding."""

from collections import Counter

import pytest

from benchmarks.overload.cli import show
from benchmarks.overload.measure import QUEUE_TIMEOUT_S, measure
from benchmarks.overload.server import Memory

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(300)]

# Allocators keep what they had; what grows without bound takes more in a few seconds of this.
MAX_GROWTH_MB = 32


def test_ten_times_too_much_is_refused_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    finding = measure(factor=10, seconds=10, capacity_s=5)
    metrics = show(finding)
    ends = Counter((each.way, each.end) for each in finding.overloaded)
    # Nobody is answered with anything else than tokens or a rejection.
    assert {end for _, end in ends} == {"answered", "rejected"}, capsys.readouterr().out
    for way in ("http", "grpc"):
        assert ends[way, "answered"] > 0
        assert ends[way, "rejected"] > ends[way, "answered"]
        # Those refused at the door hear of it at once, not when their wait is over.
        assert metrics[f"rejection_{way}_ms_p99"] < 1000 * QUEUE_TIMEOUT_S / 2
    assert all(each.has_hint for each in finding.overloaded if each.end == "rejected")
    for megabytes in finding.memory.megabytes.values():
        assert Memory(megabytes).growth < MAX_GROWTH_MB
    assert len(finding.memory.megabytes) == 3  # the driver and two frontends
    assert finding.idle_s is not None, finding.state
    assert finding.last.end == "answered"
