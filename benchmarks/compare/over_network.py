"""A server as a subject: `python -m benchmarks.compare.over_network '{OPTIONS}'`.

{"way": "grpc" | "http", "serve": [OPTION of lockstep serve]} starts Lockstep's; {"way": "http",
"command": [...], "model": name, "extra": {...}} starts another, which gets its port for {port}.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import Any

from benchmarks.clients import Client, FailedRequest, grpc_client, openai_client
from benchmarks.overload.server import served
from benchmarks.peers.runner import PROBE, Requests, answer, take_stdout

STOP_S = 20.0
# Between two tries to reach a server that starts.
RETRY_S = 0.1


class ServerEnded(Exception):
    """Its own output tells why."""


@contextmanager
def own_server(
    options: dict[str, Any],
) -> Iterator[tuple[AbstractAsyncContextManager[Client], int]]:
    """A client to be entered, and the process id of the server."""
    with served(options["serve"]) as (target, pid):
        if options["way"] == "grpc":
            yield grpc_client(target.grpc_address, target.api_key), pid
        else:
            url = f"http://{target.http_address}"
            yield openai_client(url, model=target.model, api_key=target.api_key), pid


@contextmanager
def other_server(
    options: dict[str, Any],
) -> Iterator[tuple[AbstractAsyncContextManager[Client], int]]:
    port = free_port()
    command = [each.replace("{port}", str(port)) for each in options["command"]]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        client = openai_client(url, model=options["model"], extra=options["extra"])
        yield started(client, server), server.pid
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@asynccontextmanager
async def started(
    client: AbstractAsyncContextManager[Client], server: subprocess.Popen[bytes] | None
) -> AsyncIterator[Client]:
    """Once the server has answered a request. None: it is there already, and asked once.

    Raises ServerEnded: it did before that. Raises FailedRequest: one that is there doesn't answer.
    """
    async with client as entered:
        while True:
            try:
                await complete_all(entered, PROBE)
                break
            except FailedRequest as error:
                if server is None:
                    raise
                if server.poll() is not None:
                    raise ServerEnded(f"the server ended with code {server.returncode}") from error
                # It has no other sign by which every server says that it is ready.
                await asyncio.sleep(RETRY_S)
        yield entered


def free_port() -> int:
    """One that was free just now: other servers don't tell which they took."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def complete_all(client: Client, requests: Requests) -> list[int]:
    """How many tokens each got, all asked for at once."""
    answers = await asyncio.gather(
        *(client.complete(each["prompt"], each["output_len"]) for each in requests)
    )
    return [each.num_tokens for each in answers]


def main() -> None:
    answers = take_stdout()
    options = json.loads(sys.argv[1])
    is_ours = "serve" in options
    name = f"Lockstep {version('lockstep-serving')}" if is_ours else options["engine"]
    start = own_server if is_ours else other_server
    with asyncio.Runner() as runner, start(options) as (client, pid):
        try:
            entered = runner.run(client.__aenter__())
        except ServerEnded as error:
            sys.exit(str(error))
        try:
            answer(
                answers,
                name,
                lambda requests: runner.run(complete_all(entered, requests)),
                memory_root=pid,
            )
        finally:
            runner.run(client.__aexit__(None, None, None))


if __name__ == "__main__":
    main()
