"""What a Ray that drivers join, and leave in whatever way, has left of its resources."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.multinode.ray_nodes import RayNodes
from tests.crashing_driver import STAGES
from tests.hosts import network
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster]

CYCLE_S = 120.0
VICTIMS = ("rank", "driver")
CYCLES = [*itertools.product(STAGES, VICTIMS)]

# Ray hears of a driver's death in its own time.
LOOK = """
import json, sys, threading
import ray
from ray.util import placement_group_table

ray.init(address=sys.argv[1], configure_logging=False)
pause = threading.Event()
for _ in range(300):
    free, total = ray.available_resources(), ray.cluster_resources()
    groups = [each["state"] for each in placement_group_table().values()]
    if free == total and {*groups} <= {"REMOVED"}:
        break
    pause.wait(0.1)
print(json.dumps([free, total, [each for each in groups if each != "REMOVED"]]))
"""


def run_on(nodes: RayNodes, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        nodes.network.command(0, [sys.executable, *words]),
        env={**os.environ, **nodes.environment},
        capture_output=True,
        text=True,
        timeout=CYCLE_S,
        check=False,
    )


def look(nodes: RayNodes) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """What is free, what there is, and the states of placement groups that aren't removed."""
    looked = run_on(nodes, "-c", LOOK, nodes.address)
    assert looked.returncode == 0, looked.stderr
    free, total, groups = json.loads(looked.stdout)
    return free, total, groups


@pytest.mark.parametrize(
    "cycles",
    [
        # Each stage once, and each victim.
        pytest.param(
            CYCLES[::4] + CYCLES[3::4],
            marks=[pytest.mark.full, pytest.mark.timeout(600)],
            id="some",
        ),
        pytest.param(
            CYCLES * 5, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)], id="fifty"
        ),
    ],
)
def test_crashed_drivers_and_ranks_leave_all_resources(
    cycles: list[tuple[str, str]], tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path)
    with network(1) as host, RayNodes(host, cpus_per_node=2) as nodes:
        before = look(nodes)
        for stage, victim in cycles:
            ended = run_on(
                nodes, "-m", "tests.crashing_driver", nodes.address, str(model), stage, victim
            )
            wanted = -signal.SIGKILL if victim == "driver" else 0
            assert ended.returncode == wanted, (stage, victim, ended.stdout, ended.stderr)
        after = look(nodes)

    free, total, groups = after
    assert before == after
    assert free == total
    assert free["CPU"] == 2
    assert groups == []
