"""Whether ranks reach each other, asked before they exchange tensors."""

import os
from typing import TYPE_CHECKING

from protos import worker_pb2
from workers.errors import StepError
from workers.interface import VARIABLES, Endpoint, choose_interface, find_faults

if TYPE_CHECKING:
    import socket

MAX_ENDPOINTS = 4096
MAX_TIMEOUT_MS = 60_000


class Reachability:
    """One rank's side of it: a port for the others, and what it finds of theirs."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def listen(self, request: worker_pb2.ListenRequest) -> worker_pb2.ListenReply:
        """Opens a port where tensors will come in. The kernel answers there; nothing is read.

        Raises StepError: there is no such device. Raises NetworkError: there is no such interface.
        """
        if request.device not in VARIABLES:
            raise StepError(f"device={request.device} must be one of {', '.join(VARIABLES)}")
        interface = choose_interface(
            request.host,
            wanted=request.interface,
            device=request.device,
            environment=os.environ,
        )
        self._listener = interface.listen()
        return worker_pb2.ListenReply(
            interface=interface.name,
            address=interface.address,
            port=self._listener.getsockname()[1],
        )

    def reach(self, request: worker_pb2.ReachRequest) -> worker_pb2.ReachReply:
        """Raises StepError: a value is out of range."""
        if len(request.endpoints) > MAX_ENDPOINTS:
            raise StepError(f"{len(request.endpoints)} endpoints are more than {MAX_ENDPOINTS}")
        if not 1 <= request.timeout_ms <= MAX_TIMEOUT_MS:
            raise StepError(f"timeout_ms={request.timeout_ms} must be in [1, {MAX_TIMEOUT_MS}]")
        endpoints = [Endpoint(each.host, each.port) for each in request.endpoints]
        for endpoint in endpoints:
            if not 1 <= endpoint.port <= 65535:
                raise StepError(f"port={endpoint.port} must be in [1, 65535]")
        faults = find_faults(endpoints, request.timeout_ms / 1000)
        return worker_pb2.ReachReply(faults=faults)

    def close(self) -> None:
        """The port is needed no more. May be called twice."""
        if self._listener is not None:
            self._listener.close()
