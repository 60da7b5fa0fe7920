"""Reads recordings: the files of a run, and the records in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from google.protobuf import proto
from google.protobuf.message import DecodeError

from protos.recording_pb2 import Header, Record
from runtime.errors import ConfigError
from runtime.recording.encoder import FORMAT
from runtime.recording.writer import SUFFIX

if TYPE_CHECKING:
    from io import BytesIO


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """One file of a recording."""

    path: Path
    header: Header
    begins_idle: bool  # with the state of a scheduler in which nothing lives

    @property
    def is_start(self) -> bool:
        """Whether a scheduler can be replayed from here."""
        return self.header.number == 1 or self.begins_idle

    @property
    def name(self) -> str:
        return self.path.name


class Recording:
    """The files of one run, without those that had to go."""

    def __init__(self, files: list[RecordFile]) -> None:
        self.files = files
        self.header = files[0].header
        self.damage: str | None = None  # what the end lacks, once it was read

    def records(self, start: RecordFile | None = None) -> Iterator[Record]:
        """From the front of a file on, where there is one. The last file's end may be cut.

        Raises ConfigError: another file is damaged, or is missing.
        """
        first = 0 if start is None else self.files.index(start)
        first_number = self.files[first].header.number
        for number, file in enumerate(self.files[first:], first_number):
            if file.header.number != number:
                raise ConfigError(
                    f"{file.path.parent}: file {number} of run {self.header.run} is missing"
                )
            try:
                yield from _read(file.path)
            except (ValueError, DecodeError) as error:
                if file is not self.files[-1]:
                    raise ConfigError(f"{file.path} is damaged: {error}") from error
                self.damage = f"the end of {file.name} is cut"

    def scheduler_start(self) -> RecordFile:
        """The first file from which a scheduler can be replayed.

        Raises ConfigError: there is none, or the recording is redacted.
        """
        if self.header.redacted:
            raise ConfigError(
                f"run {self.header.run} is redacted: it has no token ids, so that nothing can be "
                "replayed; `lockstep trace` shows what happened when"
            )
        for file in self.files:
            if file.is_start:
                return file
        raise ConfigError(
            f"run {self.header.run} has lost its first {self.header.number - 1} files to "
            "record_max_bytes, and the engine wasn't idle at the front of any other: record again "
            "with more"
        )


def open_recording(folder: Path, run: str | None = None) -> Recording:
    """The latest run in a folder, or the one of that name.

    Raises ConfigError: there is none, or a file can't be read.
    """
    runs: dict[str, list[RecordFile]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        file = _open_file(path)
        if file is not None:
            runs.setdefault(file.header.run, []).append(file)
    if not runs:
        raise ConfigError(f"{folder} has no recording: {SUFFIX} files are what --record makes")
    name = max(runs) if run is None else run
    if name not in runs:
        raise ConfigError(f"run={name!r} isn't in {folder}: there are {', '.join(sorted(runs))}")
    return Recording(sorted(runs[name], key=lambda each: each.header.number))


def _open_file(path: Path) -> RecordFile | None:
    """None: nothing was written to it before its engine ended."""
    records = _read(path)
    first = second = None
    try:
        first = next(records, None)
        second = next(records, None)
        if second is not None and second.HasField("contents"):
            second = next(records, None)
    except (ValueError, DecodeError):
        second = None  # the end is cut, which whoever reads that far is told
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if first is None:
        return None
    if not first.HasField("header"):
        raise ConfigError(f"{path} doesn't begin as a recording does")
    if first.header.format != FORMAT:
        raise ConfigError(
            f"{path} is of format {first.header.format}: this version reads format {FORMAT}"
        )
    begins_idle = second is not None and second.HasField("state")
    return RecordFile(path=path, header=first.header, begins_idle=begins_idle)


def _read(path: Path) -> Iterator[Record]:
    """Raises ValueError or DecodeError: a record is cut, or is none."""
    with path.open("rb") as file:
        yield from _records(file)


def _records(file: IO[bytes]) -> Iterator[Record]:
    buffer = cast("BytesIO", file)
    while (record := proto.parse_length_prefixed(Record, buffer)) is not None:
        yield record
