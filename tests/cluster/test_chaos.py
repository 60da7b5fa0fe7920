"""Faults under load: nothing is lost, nothing differs, nothing is left. `benchmarks chaos`."""

import io
from typing import Any

import pytest

from benchmarks.chaos.cli import row_of
from benchmarks.chaos.faults import BETWEEN_NODES, KINDS
from benchmarks.chaos.findings import Result
from benchmarks.chaos.run import Case, run
from runtime.errors import ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

KINDS_HERE = [kind for kind in KINDS if kind not in BETWEEN_NODES]
SEED = 20


def survive(num_faults: int, **changes: Any) -> Result:
    """What came of it; shown, with the server's log, where the test fails.

    Skips where two nodes can't be made.
    """
    fields = {"launcher": "local", "num_faults": num_faults, "kinds": KINDS_HERE, "seed": SEED}
    log = io.StringIO()
    try:
        return run(Case(**fields | changes), log=log, on_finding=lambda each: print(row_of(each)))
    except ConfigError as error:
        pytest.skip(str(error))
    finally:
        print(log.getvalue())


def check(result: Result, num_faults: int) -> None:
    assert list(result.complaints()) == []
    assert len(result.findings) == num_faults
    assert result.disturbed.num_requests > 0
    assert result.num_preemptions > 0  # the pool was small enough for these too


@pytest.mark.full
def test_a_kill_under_load_loses_nothing() -> None:
    result = survive(1, kinds=["kill"], num_asks=14)
    check(result, 1)
    assert result.metrics()["detection_s_max_kill"] < 5


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_ten_faults_lose_nothing(launcher: str) -> None:
    check(survive(10, launcher=launcher), 10)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_loss_of_a_node_and_of_the_way_to_it_lose_nothing() -> None:
    check(survive(2, launcher="ray", num_nodes=2, kinds=BETWEEN_NODES), 2)


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3600)
def test_faults_of_two_nodes_lose_nothing() -> None:
    check(survive(30, launcher="ray", num_nodes=2, kinds=KINDS, minutes=20), 30)


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_hundred_faults_lose_nothing(launcher: str) -> None:
    check(survive(100, launcher=launcher, minutes=30), 100)
