"""What servers in this process have open, beside all else that is open in it."""

import contextlib
import os
import socket
import threading
from collections.abc import Collection
from typing import NamedTuple


class Open(NamedTuple):
    """What a server must not have more and more of."""

    files: dict[str, str]
    threads: list[str]

    def more_than(self, other: "Open") -> str:
        """What of this is more than the other has; empty if nothing is."""
        if len(self.files) <= len(other.files) and len(self.threads) <= len(other.threads):
            return ""
        files = {number: what for number, what in self.files.items() if number not in other.files}
        return f"files {files}, threads {self.threads}, before {other}"


def look(ports: Collection[int]) -> Open:
    """What servers at these ports of 127.0.0.1 have, and this process beside its sockets."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread closed it
            what = os.readlink(f"/proc/self/fd/{number}")
            if not _comes_and_goes(int(number), what, ports):
                files[number] = what
    # The loop's own pool grows to its size in its own time.
    names = [each.name for each in threading.enumerate()]
    return Open(files, [name for name in names if not name.startswith("uvloop_")])


def _comes_and_goes(number: int, what: str, ports: Collection[int]) -> bool:
    """What gRPC and loops wake up by, and sockets of clients, engines and earlier tests."""
    if not what.startswith("socket:"):
        return what.startswith("anon_inode:")
    with socket.socket(fileno=os.dup(number)) as copy:
        # This end is known as long as it isn't closed, also where the other has reset it.
        if copy.family == socket.AF_UNIX:
            return "lockstep-grpc-" not in str(copy.getsockname())
        return copy.family != socket.AF_INET or copy.getsockname()[1] not in ports
