"""Recorded steps that run again by themselves, on the oracle: it reads what was computed first."""

from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.recording.segment import RunVerdict, Segment, read_segment, run_segment
from tests.quick import quick
from tests.recording import RecordedEngine, live_at_random, make_setup, read
from tests.scheduling import Chunk, OracleExecutor
from tests.structured import Client, RandomExecutor, make_compiler, write_tokenizer

pytestmark = pytest.mark.wire

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def segment_of(
    folder: Path, first_step: int | None = None, num_steps: int | None = None
) -> Segment:
    return read_segment(read(folder), first_step=first_step, num_steps=num_steps)


def run(segment: Segment, executor_class: type[OracleExecutor] = OracleExecutor) -> RunVerdict:
    return run_segment(executor_class(segment.layout), segment)


@pytest.mark.parametrize(
    ("windows", "depth"),
    quick(product([(0,), (0, 6, Chunk(8))], [1, 3]), ((0,), 1), ((0, 6, Chunk(8)), 3)),
    ids=str,
)
def test_any_segment_gives_the_recorded_tokens(
    tmp_path: Path, windows: tuple[int, ...], depth: int
) -> None:
    setup = make_setup(num_blocks=30 * len(windows), windows=windows)
    engine = RecordedEngine(tmp_path, setup=setup, depth=depth, steps=True)
    live_at_random(engine, seed=depth, num_requests=40)
    engine.recorder.close()
    num_steps = engine.ranks.plans[-1].step_id
    whole = run(segment_of(tmp_path))
    assert (whole.difference, whole.num_steps, whole.num_prefilled) == (None, num_steps, 0)
    for first in range(2, num_steps - 10, 9):
        segment = segment_of(tmp_path, first, 8)
        verdict = run(segment)
        assert (verdict.difference, verdict.num_steps) == (None, 8)
        assert [each.plan.step_id for each in segment.steps] == [*range(first, first + 8)]


def test_a_segment_takes_the_blocks_that_it_touches(tmp_path: Path) -> None:
    engine = RecordedEngine(tmp_path, steps=True, setup=make_setup(num_blocks=400))
    engine.add(1, [*range(1, 41)], params={"ignore_eos": True})
    for _ in range(4):
        engine.step()
    engine.add(2, [7] * 3)
    engine.drain()
    engine.recorder.close()
    segment = segment_of(tmp_path, 4, 2)
    assert segment.layout.num_blocks == 11  # 42 tokens
    verdict = run(segment)
    assert (verdict.difference, verdict.num_tokens, verdict.num_prefilled) == (None, 2, 42)


def test_other_tokens_are_told_with_step_and_row(tmp_path: Path) -> None:
    engine = RecordedEngine(tmp_path, steps=True)
    engine.add(1, [1, 2, 3])
    engine.add(2, [4, 5, 6])
    engine.drain()
    engine.recorder.close()
    segment = segment_of(tmp_path)
    changed = segment.steps[1]
    token = changed.token_ids[1]
    changed.token_ids[1] += 1
    verdict = run(segment)
    assert str(verdict.difference) == (
        f"step 2, row 1, sequence 2: token {token}, recorded {token + 1}"
    )
    assert (verdict.num_steps, verdict.num_tokens) == (1, 2)


def test_what_the_cache_held_matters(tmp_path: Path) -> None:
    engine = RecordedEngine(tmp_path, steps=True)
    engine.add(1, [1, 2, 3])
    engine.drain()
    engine.recorder.close()
    segment = segment_of(tmp_path, 3)
    assert run(segment).difference is None
    empty = OracleExecutor(segment.layout)
    empty.cache[:] = 0
    assert run_segment(empty, replace(segment, fills=[])).difference is not None


def test_masks_come_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with closing(make_compiler(write_tokenizer(tmp_path / "model"))) as compiler:
        setup = make_setup(num_blocks=120)
        engine = RecordedEngine(
            tmp_path, RandomExecutor, setup=setup, compiler=compiler, steps=True
        )
        client = Client(engine.engine)
        engine.engine.start()
        client.add(1, json_schema=SCHEMA)
        client.add(2, json_schema=SCHEMA, repetition_penalty=1.3)
        client.wait(2)
        engine.engine.stop()
    engine.recorder.close()
    for first in (None, 5):
        verdict = run(segment_of(tmp_path, first), RandomExecutor)
        assert verdict.difference is None
        assert verdict.num_tokens > 8


def test_a_segment_begins_in_any_file(tmp_path: Path) -> None:
    """Each file begins with what the cache held, so that those before it needn't be there."""
    engine = RecordedEngine(tmp_path, steps=True, max_bytes=400_000)
    live_at_random(engine, seed=5, num_requests=60)
    engine.recorder.close()
    recording = read(tmp_path)
    assert recording.files[0].header.number > 1
    last = engine.ranks.plans[-1].step_id
    for first in range(last - 30, last - 10, 5):
        assert run(segment_of(tmp_path, first, 6)).difference is None
    with pytest.raises(ConfigError, match="from_step=1: the recording begins with step"):
        segment_of(tmp_path, 1)
    with pytest.raises(ConfigError, match="from_step=99999: the recording has no such step"):
        segment_of(tmp_path, 99999)


@pytest.mark.parametrize(
    ("options", "message"), [({}, "has no whole steps"), ({"redact": True}, "is redacted")]
)
def test_a_recording_without_steps_is_refused(
    tmp_path: Path, options: dict[str, bool], message: str
) -> None:
    engine = RecordedEngine(tmp_path, **options)
    engine.add(1, [1, 2, 3])
    engine.drain()
    engine.recorder.close()
    with pytest.raises(ConfigError, match=f"run {message}: .* record with --record-steps"):
        segment_of(tmp_path)
