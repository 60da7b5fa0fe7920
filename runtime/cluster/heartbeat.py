"""Renews the leases of a group's workers, and notices those that don't answer."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import grpc

from protos import worker_pb2
from runtime.cluster.worker_client import WorkerClient

logger = logging.getLogger(__name__)

# Renewals of a lease: so many may be lost or late before it runs out.
NUM_RENEWALS = 10

OnSilent = Callable[[int, str], None]  # rank, cause


class Heartbeat:
    """Sends each worker of a group a renewal NUM_RENEWALS times a lease, until it is closed.

    A rank that owes as many answers as a lease has renewals is hung, stopped or cut off:
    `on_silent` gets it once `watch` was called. What is counted are renewals, not seconds, as this
    process may have been stopped itself.
    """

    def __init__(
        self, clients: Sequence[WorkerClient], *, lease_s: float, on_silent: OnSilent
    ) -> None:
        self._lease_s = lease_s
        self._on_silent = on_silent
        self._closing = threading.Event()
        self._watching = threading.Event()
        self._pulses = [_Pulse(client, lease_s) for client in clients]
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self) -> None:
        """Silence counts from now on: the ranks have loaded, which may keep them busy."""
        self._watching.set()

    def close(self) -> None:
        """From any thread."""
        self._closing.set()
        for pulse in self._pulses:
            pulse.close()

    def _run(self) -> None:
        was_watching = False
        while not self._closing.is_set():
            is_watching = self._watching.is_set()
            for rank, pulse in enumerate(self._pulses):
                if is_watching and not was_watching:
                    pulse.forgive()
                if is_watching and pulse.num_owed >= NUM_RENEWALS:
                    self._on_silent(rank, f"it has been silent for {self._lease_s:g} s")
                    return
                pulse.beat()
            was_watching = is_watching
            self._closing.wait(self._lease_s / NUM_RENEWALS)


class _Pulse:
    """One rank's stream, and the thread that reads it."""

    def __init__(self, client: WorkerClient, lease_s: float) -> None:
        self._client = client
        self._lease_ms = round(1000 * lease_s)
        self._number = 0
        self._answered = 0
        self._renewals: SimpleQueue[worker_pb2.LeaseRenewal | None] = SimpleQueue()
        self._call = client.keep_alive(self._outgoing())
        name = f"rank-{client.address.rank}-heartbeat"
        threading.Thread(target=self._read, name=name, daemon=True).start()

    @property
    def num_owed(self) -> int:
        return self._number - self._answered

    def forgive(self) -> None:
        """What wasn't answered so far doesn't count."""
        self._answered = self._number

    def beat(self) -> None:
        self._number += 1
        renewal = self._client.renewal(self._number, self._lease_ms)
        self._renewals.put(renewal)

    def close(self) -> None:
        self._renewals.put(None)
        self._call.cancel()

    def _outgoing(self) -> Iterator[worker_pb2.LeaseRenewal]:
        return iter(self._renewals.get, None)

    def _read(self) -> None:
        try:
            for renewal in self._call:
                self._answered = max(self._answered, renewal.number)
        except grpc.RpcError as error:  # the rank is silent from now on
            logger.debug("rank %d: %s", self._client.address.rank, error.details())
