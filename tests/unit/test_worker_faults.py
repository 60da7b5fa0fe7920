"""Faults on purpose: what a rank does about a file in the folder, and when it looks at all."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.errors import ModelError
from workers.faults import (
    FOLDER_VARIABLE,
    Fault,
    FaultError,
    FaultyExecutor,
    put_fault,
    with_faults,
)

pytestmark = pytest.mark.unit


@dataclass
class FakeExecutor:
    sizes: list[int] = field(default_factory=list)

    def forward(self, batch: Any) -> Any:
        self.sizes.append(len(batch.input_ids))
        return batch.input_ids


@dataclass(frozen=True)
class FakeSide:
    load: Any


def batch(num_tokens: int) -> Any:
    return SimpleNamespace(input_ids=[0] * num_tokens)


def faulty(folder: Path, rank: int = 0) -> tuple[FaultyExecutor, list[float]]:
    """With how long it has slept."""
    slept: list[float] = []
    return FaultyExecutor(FakeExecutor(), folder / f"rank-{rank}", slept.append), slept


def test_a_rank_is_late_once(tmp_path: Path) -> None:
    executor, slept = faulty(tmp_path)
    path = put_fault(tmp_path, 0, Fault(kind="late", seconds=30))
    assert [executor.forward(batch(3)) for _ in range(2)] == [[0] * 3] * 2
    assert slept == [30]
    assert not path.exists()


def test_another_rank_has_no_fault(tmp_path: Path) -> None:
    executor, slept = faulty(tmp_path, rank=1)
    path = put_fault(tmp_path, 0, Fault(kind="raise"))
    executor.forward(batch(3))
    assert slept == []
    assert path.exists()


def test_a_rank_fails_once_and_nothing_runs(tmp_path: Path) -> None:
    executor, _ = faulty(tmp_path)
    put_fault(tmp_path, 0, Fault(kind="raise"))
    with pytest.raises(FaultError, match=FOLDER_VARIABLE):
        executor.forward(batch(3))
    assert executor.forward(batch(2)) == [0, 0]
    assert executor._executor.sizes == [2]


def test_a_fault_waits_for_a_step_of_its_size(tmp_path: Path) -> None:
    executor, slept = faulty(tmp_path)
    put_fault(tmp_path, 0, Fault(kind="late", seconds=5, min_tokens=100))
    executor.forward(batch(99))
    assert slept == []
    executor.forward(batch(100))
    assert slept == [5]


@pytest.mark.parametrize("environment", [{}, {FOLDER_VARIABLE: ""}])
def test_nothing_is_there_unless_it_is_asked_for(environment: dict[str, str]) -> None:
    side = FakeSide(load=lambda *_: FakeExecutor())
    assert with_faults(side, environment) is side


def test_a_model_says_that_it_fails_on_purpose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    side = with_faults(FakeSide(load=lambda *_: FakeExecutor()), {FOLDER_VARIABLE: str(tmp_path)})
    executor = side.load(SimpleNamespace(rank=1), None, None)
    assert "rank 1 fails on purpose" in caplog.text
    (tmp_path / "rank-1").write_text(json.dumps({"kind": "raise"}))
    with pytest.raises(FaultError):
        executor.forward(batch(1))


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    side = with_faults(FakeSide(load=lambda *_: FakeExecutor()), {FOLDER_VARIABLE: str(tmp_path)})
    with pytest.raises(ModelError, match="nobody but the worker's user"):
        side.load(SimpleNamespace(rank=0), None, None)


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    environment = {FOLDER_VARIABLE: str(tmp_path / "nowhere")}
    side = with_faults(FakeSide(load=lambda *_: FakeExecutor()), environment)
    with pytest.raises(ModelError, match="nowhere"):
        side.load(SimpleNamespace(rank=0), None, None)
