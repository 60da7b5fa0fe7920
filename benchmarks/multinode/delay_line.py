"""Copies frames between pairs of network interfaces, each a while after it came.

`python delay_line.py SECONDS ONE:OTHER...`, a process of its own, run by path: it imports next to
nothing. It writes a line once it copies, and ends with its standard input.
"""

import select
import socket
import sys
from collections import deque
from time import perf_counter

ALL_PROTOCOLS = 0x0003
SOL_PACKET = 263
# Frames come with what the kernel left for a card to do (checksums, segments), and go so.
PACKET_VNET_HDR = 15
SO_RCVBUFFORCE = 33
MAX_FRAME_BYTES = 1 << 17
BUFFER_BYTES = 8 << 20


def main() -> None:
    delay_s = float(sys.argv[1])
    ways: dict[socket.socket, socket.socket] = {}
    for pair in sys.argv[2:]:
        one, other = (_open(name) for name in pair.split(":"))
        ways |= {one: other, other: one}
    print("copying", flush=True)
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # all wait equally long
    while True:
        timeout = max(0.0, waiting[0][0] - perf_counter()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *ways], [], [], timeout)
        if sys.stdin in ready:
            return
        for source, target in ways.items():
            if source not in ready:
                continue
            frame, (_, _, kind, *_) = source.recvfrom(MAX_FRAME_BYTES)
            if kind != socket.PACKET_OUTGOING:
                waiting.append((perf_counter() + delay_s, target, frame))
        while waiting and waiting[0][0] <= perf_counter():
            _, target, frame = waiting.popleft()
            target.send(frame)


def _open(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    opened.bind((interface, 0))
    return opened


if __name__ == "__main__":
    main()
