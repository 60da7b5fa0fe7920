"""Recordings of engines over the oracle, and schedulers that decide again."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from runtime.arrays import INT32, pack
from runtime.errors import ConfigError
from runtime.recording.replay import Verdict, replay_scheduler
from runtime.scheduling import step_budget
from runtime.scheduling.block_pool import BlockPool
from runtime.scheduling.limits import QueueLimits
from runtime.scheduling.policy import FcfsPolicy
from tests.recording import RecordedEngine, live_at_random, make_setup, read, records_of
from tests.scheduling import Chunk
from tests.structured import Client, RandomExecutor, make_compiler, write_tokenizer
from tests.structures import SCHEMAS

pytestmark = pytest.mark.wire


def replay(folder: Path) -> Verdict:
    recording = read(folder)
    return replay_scheduler(recording.records(recording.scheduler_start()))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_every_plan_comes_again(tmp_path: Path, policy: str, depth: int) -> None:
    setup = make_setup(policy=policy, num_blocks=30, queue=QueueLimits(max_queued_requests=4))
    engine = RecordedEngine(tmp_path, setup=setup, depth=depth)
    live_at_random(engine, seed=depth)
    engine.recorder.close()
    assert engine.scheduler.running.num_preemptions
    assert engine.scheduler.num_refused
    assert replay(tmp_path) == Verdict(len(engine.ranks.plans), None)


def test_with_windows_and_chunks(tmp_path: Path) -> None:
    setup = make_setup(num_blocks=80, windows=(0, 6, Chunk(8)))
    engine = RecordedEngine(tmp_path, setup=setup)
    live_at_random(engine, seed=7)
    engine.recorder.close()
    assert replay(tmp_path) == Verdict(len(engine.ranks.plans), None)


def test_a_started_engine_with_structures(tmp_path: Path) -> None:
    """They are queued when they are compiled, whenever that is."""
    (tmp_path / "model").mkdir()
    with closing(make_compiler(write_tokenizer(tmp_path / "model"))) as compiler:
        setup = make_setup(num_blocks=120)
        engine = RecordedEngine(tmp_path, RandomExecutor, setup=setup, compiler=compiler)
        client = Client(engine.engine)
        engine.engine.start()
        for request_id in range(1, 13):
            params = {"json_schema": json.dumps(SCHEMAS[request_id])} if request_id % 3 else {}
            client.add(request_id, repetition_penalty=1.1, **params)
        client.connection.abort(5)
        while len(client.reasons.keys() - {(5, 0)}) + len(client.failures) < 11:
            client.wait()
        engine.engine.stop()
    engine.recorder.close()
    assert max(engine.ranks.num_masked)
    assert replay(tmp_path) == Verdict(len(engine.ranks.plans), None)


def test_a_changed_budget_is_told_with_step_and_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RecordedEngine(tmp_path)
    engine.add(1, [5] * 10)
    engine.step()
    engine.step()
    engine.add(2, [6] * 20)
    engine.drain()
    engine.recorder.close()
    assert replay(tmp_path).difference is None

    take = step_budget.StepBudget.take
    monkeypatch.setattr(
        step_budget.StepBudget,
        "take",
        lambda self, sequence: min(19, take(self, sequence)),
    )
    verdict = replay(tmp_path)
    (arrival,) = [each for each in records_of(tmp_path, "plan") if each.plan.num_tokens > 10]
    assert str(verdict.difference) == (
        f"step {arrival.plan.step_id}, row 1, sequence 2, tokens fed: 19 after 0 in the cache, "
        "recorded 20 after 0"
    )
    assert verdict.num_steps == arrival.plan.step_id - 1


def test_a_changed_order_is_told_with_step_and_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RecordedEngine(tmp_path, depth=1)
    for request_id in (1, 2, 3):
        engine.add(request_id, [request_id] * 4)
    engine.drain()
    engine.recorder.close()

    order = FcfsPolicy.order
    monkeypatch.setattr(FcfsPolicy, "order", lambda self: reversed([*order(self)]))
    verdict = replay(tmp_path)
    assert str(verdict.difference) == "step 1, row 0, order: sequence 3, recorded sequence 1"
    assert verdict.num_steps == 0


def test_changed_blocks_are_told_with_step_and_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RecordedEngine(tmp_path, depth=1)
    engine.add(1, [1, 2, 3])
    engine.drain()
    engine.recorder.close()

    allocate = BlockPool.allocate

    def backwards(self: BlockPool, count: int) -> list[int] | None:
        self._empty.reverse()
        return allocate(self, count)

    monkeypatch.setattr(BlockPool, "allocate", backwards)
    verdict = replay(tmp_path)
    assert str(verdict.difference) == (
        "step 1, row 0, sequence 1, blocks: [39] from 0 on, recorded [0] from 0 on"
    )


def test_a_step_that_is_too_few_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordedEngine(tmp_path, depth=1)
    engine.add(1, [1, 2, 3])
    engine.drain()
    engine.recorder.close()
    monkeypatch.setattr(FcfsPolicy, "order", lambda self: iter(()))
    verdict = replay(tmp_path)
    assert str(verdict.difference) == "step 1, all rows: nothing runs, recorded a step"


def test_changed_parameters_are_told(tmp_path: Path) -> None:
    """What neither order nor blocks show."""
    engine = RecordedEngine(tmp_path, depth=1)
    engine.add(1, [1, 2, 3])
    engine.drain()
    engine.recorder.close()
    records = [*read(tmp_path).records()]
    for record in records:
        if record.HasField("arrival"):
            record.arrival.seed += 1
    assert str(replay_scheduler(records).difference) == (
        "step 1, samples or their parameters: the plan's arrays aren't those recorded"
    )


def test_a_redacted_recording_is_refused(tmp_path: Path) -> None:
    engine = RecordedEngine(tmp_path, redact=True)
    engine.add(1, [701, 702, 703], cache_salt="salt of somebody", tenant="somebody")
    engine.drain()
    engine.recorder.close()
    with pytest.raises(ConfigError, match="run is redacted: it has no token ids"):
        replay(tmp_path)
    (arrival,) = records_of(tmp_path, "arrival")
    assert (arrival.arrival.num_prompt_tokens, arrival.arrival.token_ids) == (3, b"")
    (path,) = tmp_path.iterdir()
    written = path.read_bytes()
    for secret in (b"somebody", engine.setup.root, pack(INT32, [701])):
        assert secret not in written
    assert not any(each.plan.tokens_digest for each in records_of(tmp_path, "plan"))


def test_a_replay_begins_where_the_engine_was_idle(tmp_path: Path) -> None:
    """Of files that the cap has left; prefixes that were cached before are still found."""
    engine = RecordedEngine(tmp_path, max_bytes=60_000)
    for seed in range(12):
        live_at_random(engine, seed, num_requests=12)
        engine.idle()
    engine.recorder.close()
    recording = read(tmp_path)
    assert recording.files[0].header.number > 1
    start = recording.scheduler_start()
    found = replay_scheduler(recording.records(start))
    assert found.difference is None
    plans = [each.plan.step_id for each in recording.records(start) if each.HasField("plan")]
    assert found.num_steps == len(plans) > 100
    assert plans[-1] == engine.ranks.plans[-1].step_id > len(plans)
    states = [each.state for each in recording.records(start) if each.HasField("state")]
    assert states[0].nodes
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 60_000
