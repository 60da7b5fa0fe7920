"""A request by HTTP on a connection of its own, as of a client that comes once."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple


class Reply(NamedTuple):
    """What came of it so far."""

    status: int
    headers: frozenset[str]  # their names
    body: asyncio.StreamReader


@asynccontextmanager
async def posted(
    address: str, path: str, body: Mapping[str, object], *, api_key: str
) -> AsyncIterator[Reply]:
    """Sends it; hangs up at the end of the block. Raises OSError: the server can't be reached."""
    content = json.dumps(body).encode()
    host, port = address.rsplit(":", 1)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        f"authorization: Bearer {api_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head.encode() + content)
        status, headers = await _read_head(reader)
        yield Reply(status, headers, reader)
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, frozenset[str]]:
    """Status and names of headers. Raises ConnectionError: there is none."""
    first = await reader.readline()
    if not first:
        raise ConnectionError("the server hung up")
    names = set()
    while (line := await reader.readline()) not in (b"\r\n", b""):
        names.add(line.decode("latin-1").partition(":")[0].lower())
    return int(first.split()[1]), frozenset(names)
