"""The server that gets the load: one that is there, or one that is started for it."""

import shlex
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients import Client, grpc_client, openai_client
from benchmarks.compare.over_network import STOP_S, started
from benchmarks.overload.server import served


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`url` is http://host:port for openai, host:port for grpc."""

    backend: str
    url: str
    model: str
    api_key: str | None
    command: str | None = None  # that starts it


def client_of(server: Server) -> AbstractAsyncContextManager[Client]:
    if server.backend == "grpc":
        return grpc_client(server.url, server.api_key or "")
    return openai_client(server.url, model=server.model, api_key=server.api_key)


@asynccontextmanager
async def reached(server: Server) -> AsyncIterator[Client]:
    """A client, once the server has answered, which ends with the block if it was started here.

    Raises ServerEnded: the server did before it answered. Raises FailedRequest: one that was
    there doesn't answer.
    """
    with ExitStack() as stack:
        process = None
        if server.command is not None:
            process = stack.enter_context(_process(server.command))
        async with started(client_of(server), process) as client:
            yield client


@contextmanager
def _process(command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def own_server(model: Path, backend: str) -> Iterator[Server]:
    """Lockstep on a model, for a quick run."""
    with served([f"--model={model}", "--launcher=local", "--kv-memory=16MiB"]) as (target, _):
        url = target.grpc_address if backend == "grpc" else f"http://{target.http_address}"
        yield Server(backend=backend, url=url, model=target.model, api_key=target.api_key)
