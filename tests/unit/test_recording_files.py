"""Files of recordings: their sizes, and what is left of damaged ones."""

import logging
import threading
from functools import partial
from pathlib import Path

import pytest

from protos.recording_pb2 import Abort, Header, Record, SchedulerState
from runtime.errors import ConfigError
from runtime.recording.encoder import FORMAT
from runtime.recording.reader import open_recording
from runtime.recording.writer import RecordWriter
from tests.recording import TIMEOUT_S, settle

pytestmark = pytest.mark.unit

MAX_BYTES = 8000  # a file takes from 1000 to 2000 bytes


def front(run: str, number: int) -> list[Record]:
    return [Record(header=Header(format=FORMAT, run=run, number=number))]


def make_writer(folder: Path, run: str = "run", max_bytes: int = MAX_BYTES) -> RecordWriter:
    return RecordWriter(folder, run, max_bytes=max_bytes, front=partial(front, run))


def put_aborts(writer: RecordWriter, *sequence_ids: int) -> None:
    for each in sequence_ids:
        writer.put(lambda each=each: [Record(abort=Abort(sequence_id=each))])


def aborts(folder: Path, run: str | None = None) -> list[int]:
    records = open_recording(folder, run).records()
    return [each.abort.sequence_id for each in records if each.HasField("abort")]


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def test_what_is_put_is_read(tmp_path: Path) -> None:
    writer = make_writer(tmp_path / "new" / "folder")
    put_aborts(writer, 1, 2, 3)
    writer.close()
    assert aborts(tmp_path / "new" / "folder") == [1, 2, 3]
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert path.name == "run-0001.rec"
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_written_is_there_before_the_end(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    put_aborts(writer, 1)
    for _ in range(1000):
        settle(writer)  # and in a moment it is flushed, as nothing else waits
        if aborts(tmp_path):
            break
    assert aborts(tmp_path) == [1]
    writer.close()


def test_files_are_cut_and_the_oldest_go(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    put_aborts(writer, *range(1, 4001))
    writer.close()
    found = sizes(tmp_path)
    assert sum(found.values()) <= MAX_BYTES
    assert "run-0001.rec" not in found
    *full, _ = found.values()
    assert len(full) >= 2
    assert all(2000 <= size < 2020 for size in full)
    left = aborts(tmp_path)
    assert left == [*range(left[0], 4001)]
    assert left[0] > 1


def test_the_cap_is_for_all_runs_in_the_folder(tmp_path: Path) -> None:
    for run in ("a", "b", "c"):
        writer = make_writer(tmp_path, run)
        put_aborts(writer, *range(1, 700))
        writer.close()
    found = sizes(tmp_path)
    assert sum(found.values()) <= MAX_BYTES
    assert "a-0001.rec" not in found
    assert aborts(tmp_path) == aborts(tmp_path, "c") == [*range(1, 700)]
    with pytest.raises(ConfigError, match=r"run='d' isn't in .*: there are .*c"):
        open_recording(tmp_path, "d")


def test_a_file_begins_where_its_owner_likes(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    assert not writer.wants_new_file
    put_aborts(writer, *range(1, 300))
    settle(writer)
    assert writer.wants_new_file
    writer.put(lambda: [Record(state=SchedulerState(num_arrivals=5))], begins_file=True)
    put_aborts(writer, 300)
    settle(writer)
    assert not writer.wants_new_file
    writer.close()
    recording = open_recording(tmp_path)
    assert [each.begins_idle for each in recording.files] == [False, True]
    assert [each.is_start for each in recording.files] == [True, True]
    assert [each.WhichOneof("record") for each in recording.records(recording.files[1])] == [
        "header",
        "state",
        "abort",
    ]


def test_without_its_first_file_a_scheduler_has_no_start(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    put_aborts(writer, *range(1, 4001))
    writer.close()
    with pytest.raises(ConfigError, match=r"lost its first [0-9]+ files to record_max_bytes"):
        open_recording(tmp_path).scheduler_start()


def test_a_cut_end_is_told_and_what_is_before_it_read(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    put_aborts(writer, 1, 2, 1 << 40)
    writer.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    recording = open_recording(tmp_path)
    assert [each.abort.sequence_id for each in recording.records() if each.HasField("abort")] == [
        1,
        2,
    ]
    assert recording.damage == "the end of run-0001.rec is cut"


def test_damage_before_the_last_file_is_refused(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    put_aborts(writer, *range(1, 700))
    writer.close()
    first, *_ = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"run-0001\.rec is damaged"):
        aborts(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    put_aborts(writer, *range(1, 900))
    writer.close()
    (tmp_path / "run-0002.rec").unlink()
    with pytest.raises(ConfigError, match="file 2 of run run is missing"):
        aborts(tmp_path)


def test_a_file_of_which_nothing_was_written_is_passed_over(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, "a")
    put_aborts(writer, 1)
    writer.close()
    (tmp_path / "b-0001.rec").write_bytes(b"")
    assert aborts(tmp_path) == [1]


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no recording"):
        open_recording(tmp_path)
    other = Record(header=Header(format=FORMAT + 1, run="run", number=1))
    RecordWriter(tmp_path, "run", max_bytes=MAX_BYTES, front=lambda _: [other]).close()
    with pytest.raises(ConfigError, match=f"is of format {FORMAT + 1}: this version reads"):
        open_recording(tmp_path)


def test_a_disk_that_fails_ends_the_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> list[Record]:
        raise OSError(28, "No space left on device")

    writer = make_writer(tmp_path)
    put_aborts(writer, 1)
    settle(writer)
    writer.put(full)
    writer._thread.join(TIMEOUT_S)
    put_aborts(writer, 2)
    writer.close()
    (message,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert message == (f"recording to {tmp_path} has ended: [Errno 28] No space left on device")
    assert aborts(tmp_path) == [1]


def test_what_waits_has_a_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.recording.writer.MAX_WAITING_BYTES", 1000)
    going = threading.Event()

    def slow() -> list[Record]:
        assert going.wait(TIMEOUT_S)
        return []

    writer = make_writer(tmp_path)
    writer.put(slow)
    put_aborts(writer, *range(1, 20))
    going.set()
    writer.close()
    (message,) = [each.getMessage() for each in caplog.records]
    assert "has ended: 1000 bytes wait to be written: the disk is too slow" in message
