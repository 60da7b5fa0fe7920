"""Memory that processes of one host share, and that is gone with the last of them.

It has no name in any folder: a process that is killed leaves nothing behind. Others open it by way
of the process that made it, in /proc.
"""

import ctypes
import mmap
import os
import secrets
from dataclasses import dataclass


class NotSharedError(Exception):
    """Two processes can't have the same memory; says why in half a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What another process must know."""

    process: int
    descriptor: int
    name: str  # random: who finds it has found the same memory
    network: int  # the network namespace


class HostMemory:
    """A part of it, seen by one process."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Takes the descriptor over. Raises OSError."""
        self.descriptor = descriptor
        try:
            self._mapped = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def address(self) -> int:
        """Valid until `close`."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))

    def close(self) -> None:
        """May be called once."""
        self._mapped.close()
        os.close(self.descriptor)


def create(num_bytes: int) -> tuple[HostMemory, Offer]:
    """Makes memory, all zero, and all of it there: a lack of it shows now, not while it is used.

    Raises NotSharedError, OSError.
    """
    if not hasattr(os, "memfd_create"):
        raise NotSharedError("only Linux has memory without a name")
    name = f"lockstep-{secrets.token_hex(16)}"
    descriptor = os.memfd_create(name)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    offer = Offer(process=os.getpid(), descriptor=descriptor, name=name, network=_network())
    return HostMemory(descriptor, num_bytes), offer


def attach(offer: Offer, num_bytes: int) -> HostMemory:
    """Opens the memory that another process, or thread, has made.

    Raises NotSharedError: it isn't to be found here. Raises OSError.
    """
    # Who puts ranks into networks of their own means them to be as on different hosts: if the
    # network between them fails they must part.
    if offer.network != _network():
        raise NotSharedError("it is on another host than rank 0, or in another network namespace")
    path = f"/proc/{offer.process}/fd/{offer.descriptor}"
    try:
        found = os.readlink(path)
    except OSError as error:
        raise NotSharedError(f"it can't see rank 0's memory: {error}") from error
    # Before it is opened: on another host, or among other process ids, it may be anything.
    if found != f"/memfd:{offer.name} (deleted)":
        raise NotSharedError(f"{path} isn't rank 0's memory: another host, or other process ids")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    made = os.fstat(descriptor).st_size
    if made != num_bytes:
        os.close(descriptor)
        raise NotSharedError(f"rank 0 has {made} bytes where it needs {num_bytes}: other versions")
    return HostMemory(descriptor, num_bytes)


def _network() -> int:
    return os.stat("/proc/self/ns/net").st_ino
