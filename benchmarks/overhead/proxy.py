"""A TCP proxy that takes its time, each way, and what it adds to a round trip."""

import asyncio
import selectors
import socket
import threading
from collections import deque
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import cast

from benchmarks.overhead.child import Child, next_message

HOST = "127.0.0.1"
ECHO_S = 0.02
NUM_PROBES = 25


class Delay:
    """How long each way takes from now on."""

    def __init__(self) -> None:
        self.seconds = 0.0


class _Side(asyncio.Protocol):
    """One end of a connection: what comes is written to the other end, in its order, later."""

    def __init__(self, delay: Delay) -> None:
        self.other: _Side | None = None
        self.transport: asyncio.Transport | None = None
        self._delay = delay
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[bytes | None] = deque()  # None: the end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._put(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._put(None)

    def _put(self, data: bytes | None) -> None:
        self._waiting.append(data)
        # Whichever call comes first passes on what came first.
        self._loop.call_later(self._delay.seconds, self._pass_on)

    def _pass_on(self) -> None:
        data = self._waiting.popleft()
        assert self.other is not None, "no data is read before both ends are there"
        assert self.other.transport is not None, "no data is read before both ends are there"
        if data is None:
            self.other.transport.close()
        elif not self.other.transport.is_closing():
            self.other.transport.write(data)


class _Accepted(_Side):
    """The end of who connects to the proxy."""

    def __init__(self, delay: Delay, target_port: int) -> None:
        super().__init__(delay)
        self._target_port = target_port
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast("asyncio.Transport", transport).pause_reading()
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        assert self.transport is not None
        _, far = await self._loop.create_connection(
            lambda: _Side(self._delay), HOST, self._target_port
        )
        self.other, far.other = far, self
        self.transport.resume_reading()


def run_proxy(pipe: Connection, target_ports: list[int]) -> None:
    """Tells the ports that lead to the targets; each message is the seconds of each way."""
    delay = Delay()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ports = []
        for target in target_ports:
            server = await loop.create_server(partial(_Accepted, delay, target), HOST, 0)
            ports.append(server.sockets[0].getsockname()[1])
        pipe.send(ports)
        while (seconds := await asyncio.to_thread(next_message, pipe)) is not None:
            delay.seconds = seconds
            pipe.send(None)

    # epoll's waits are whole milliseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(run())


class Echo:
    """A port that sends back what comes, to time the way to it."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="echo", daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_send_back, args=(connection,), daemon=True).start()


def _send_back(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while data := connection.recv(64):
            connection.sendall(data)


class DelayedWay:
    """What a proxy adds to the round trip to an echo, which goes both through it and past it."""

    def __init__(self, proxy: Child, *, direct_port: int, proxied_port: int) -> None:
        self._proxy = proxy
        self._ports = direct_port, proxied_port

    def set(self, round_trip_s: float) -> None:
        """Has the proxy add so much; what it takes anyway comes on top."""
        self._proxy.ask(round_trip_s / 2)

    def added_s(self, until: float = 0.0) -> list[float]:
        """A number of measurements, and more until that moment of `perf_counter`."""
        added: list[float] = []
        pause = threading.Event()
        connections = [socket.create_connection((HOST, port)) for port in self._ports]
        with connections[0] as direct, connections[1] as proxied:
            while perf_counter() < until or len(added) < NUM_PROBES:
                added.append(_round_trip_s(proxied) - _round_trip_s(direct))
                pause.wait(ECHO_S)
        return added


def _round_trip_s(connection: socket.socket) -> float:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    started = perf_counter()
    connection.sendall(b"?")
    connection.recv(1)
    return perf_counter() - started
