"""Writes records to files, on a thread of its own."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from google.protobuf import proto

from protos.recording_pb2 import Record

if TYPE_CHECKING:
    from io import BytesIO

logger = logging.getLogger(__name__)

SUFFIX = ".rec"
# A file takes such a share of all before a new one is wanted, and at most twice as much.
FILE_SHARE = 8
# Where files can't be written so quickly, memory isn't filled instead.
MAX_WAITING_BYTES = 256 << 20
ITEM_BYTES = 256
CLOSE_TIMEOUT_S = 5.0

Make = Callable[[], list[Record]]


class _Item(NamedTuple):
    make: Make
    num_bytes: int  # that it keeps in memory, about
    begins_file: bool


class RecordWriter:
    """Writes what `put` is told to make to files RUN-0001.rec, RUN-0002.rec, ... in `folder`.

    All recordings in the folder take `max_bytes` together: the oldest files go. `front` makes what
    a file begins with, of its number. What can't be written ends the recording and nothing else.
    Raises OSError: there is no such folder, and none can be made.
    """

    def __init__(
        self, folder: Path, run: str, *, max_bytes: int, front: Callable[[int], list[Record]]
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._run = run
        self._max_bytes = max_bytes
        self._front = front
        self._file: IO[bytes] | None = None
        self._number = 0
        self._size = 0  # of the file
        self._num_put = 0  # bytes, by whoever puts
        self._num_done = 0  # bytes, by the thread
        self._has_ended = False
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._open()
        self._thread = threading.Thread(target=self._run_loop, name="recorder", daemon=True)
        self._thread.start()

    @property
    def wants_new_file(self) -> bool:
        """Whether the file is long enough: the next may begin where its owner likes."""
        return not self._has_ended and self._size >= self._max_bytes // FILE_SHARE

    def put(self, make: Make, *, num_bytes: int = 0, begins_file: bool = False) -> None:
        """Never blocks, never raises. One thread calls it; `make` runs on the writer's."""
        if self._has_ended:
            return
        if self._num_put - self._num_done > MAX_WAITING_BYTES:
            self._end(f"{MAX_WAITING_BYTES} bytes wait to be written: the disk is too slow")
            return
        self._num_put += ITEM_BYTES + num_bytes
        self._queue.put(_Item(make, ITEM_BYTES + num_bytes, begins_file))

    def close(self) -> None:
        """Writes what is waiting, for some seconds at most."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._end(f"what waited wasn't written within {CLOSE_TIMEOUT_S:g} s")

    def _run_loop(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if not self._has_ended:
                    self._write_item(item)
                self._num_done += item.num_bytes
        except OSError as error:
            self._end(str(error))
        except Exception as error:  # the edge of the thread: a bug of ours, which must hurt nobody
            logger.exception("the recorder failed")
            self._end(f"{type(error).__name__}: {error}")
        finally:
            self._close_file()

    def _write_item(self, item: _Item) -> None:
        if item.begins_file or self._size >= 2 * (self._max_bytes // FILE_SHARE):
            self._open()
        self._write(item.make())
        if self._queue.empty() and self._file is not None:
            self._file.flush()

    def _write(self, records: list[Record]) -> None:
        assert self._file is not None
        for record in records:
            proto.serialize_length_prefixed(record, cast("BytesIO", self._file))
        self._size = self._file.tell()

    def _open(self) -> None:
        """Begins the next file."""
        self._close_file()
        self._number += 1
        path = self._folder / f"{self._run}-{self._number:04d}{SUFFIX}"
        self._make_room()
        # Prompts are nobody else's business.
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._write(self._front(self._number))
        self._file.flush()

    def _make_room(self) -> None:
        """For a whole file."""
        sizes = {path: path.stat().st_size for path in sorted(self._folder.glob(f"*{SUFFIX}"))}
        left = self._max_bytes - 2 * (self._max_bytes // FILE_SHARE) - sum(sizes.values())
        for path, size in sizes.items():
            if left >= 0:
                return
            path.unlink()
            left += size

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()

    def _end(self, reason: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            logger.error("recording to %s has ended: %s", self._folder, reason)
