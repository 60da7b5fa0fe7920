"""A worker's gRPC server, and `python -m workers.server`: the worker as a plain process.

The process prints one line of JSON, `{"port": N}`, once it serves. It ends when its standard input
does: the driver holds the other end of that pipe, so that no worker outlives its driver.

One that is given its port was started by somebody else, who is to start it again. It ends with 0
after Shutdown, SIGTERM or SIGINT, and with 1 when its driver's lease runs out.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from workers.caller import end_with_stdin

if TYPE_CHECKING:
    import grpc

    from workers.config import WorkerConfig
    from workers.model_side import ModelSide, Parallel

TOKEN_VARIABLE = "LOCKSTEP_WORKER_TOKEN"
SERVICE_NAME = "lockstep.worker.v1.Worker"
# For health: serving until the first call, which makes the worker its driver's.
UNCLAIMED_NAME = f"{SERVICE_NAME}.unclaimed"
STOP_GRACE_S = 0.5
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"

# Of a worker that is on its own: its driver may be gone before it has renewed a lease once.
FIRST_LEASE_S = 10.0

OPENMP_LOOKS = 2000  # some 30 us

# One each for KeepAlive, Execute, Initialize and Shutdown, the rest for health.
NUM_THREADS = 9

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A port that two servers share would send a driver's calls to either of them.
    ("grpc.so_reuseport", 0),
    # The driver pings, also while no step runs.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class WorkerServer:
    """A worker that serves on `port`."""

    port: int
    stopped: threading.Event  # set once a Shutdown was answered
    server: "grpc.Server"

    def wait(self) -> None:
        """Returns after Shutdown, when the port is closed."""
        self.stopped.wait()
        self.close()

    def close(self) -> None:
        """Ends running calls after STOP_GRACE_S."""
        self.server.stop(STOP_GRACE_S).wait()


def end_without_driver() -> NoReturn:
    """Ends this process at once: the device may hang in a collective."""
    print("worker: the driver's lease ran out: it is gone, or cut off", file=sys.stderr, flush=True)
    os._exit(1)


def name_process(rank: int) -> None:
    """So that `ps` and `top` tell ranks from each other, and from spare workers."""
    name = Path(f"/proc/self/task/{os.getpid()}/comm")
    if name.exists():  # else this is no Linux
        name.write_text(f"lockstep:rank{rank}")


def serve(
    host: str,
    token: str,
    model_side: "ModelSide",
    cluster_certs: str | None = None,
    on_expired: Callable[[], None] = end_without_driver,
    on_rank: Callable[[int], None] = lambda rank: None,
    *,
    port: int = 0,
    first_lease_s: float | None = None,
) -> WorkerServer:
    """Serves Worker and health on `port` of `host`, 0 being a free one; both ask for the token.

    By mutual TLS where `cluster_certs` has the folder with its certificates; raises ValueError,
    which names the file, where they can't be used.
    `on_expired` is called once the driver has let the lease run out, which begins with the first
    renewal, or where `first_lease_s` is set with the first call; `on_rank` when it is known which
    rank this is.
    Health tells of the process under "", of steps under SERVICE_NAME: serving from AllocateCache
    until a step fails; and under UNCLAIMED_NAME whether no driver has the worker yet.
    Raises RuntimeError: the port can't be bound.
    """
    # Here, not above: the driver's process imports this module for its names alone.
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    from protos import worker_pb2_grpc
    from protos.auth import TokenInterceptor
    from protos.malformed import MalformedInterceptor
    from protos.tls import add_port, server_credentials
    from workers.service import WorkerService

    statuses = health.HealthServicer()

    def tell(name: str, serving: bool) -> None:
        statuses.set(
            name,
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING,
        )

    tell(SERVICE_NAME, False)
    tell(UNCLAIMED_NAME, True)
    service = WorkerService(
        model_side,
        partial(tell, SERVICE_NAME),
        on_expired,
        on_rank,
        partial(tell, UNCLAIMED_NAME, False),
        first_lease_s=first_lease_s,
    )
    server = grpc.server(
        ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grpc"),
        interceptors=[TokenInterceptor(token), MalformedInterceptor()],
        options=SERVER_OPTIONS,
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    credentials = None if cluster_certs is None else server_credentials(cluster_certs)
    bound = add_port(server, _with_port(host, port), credentials)
    server.start()
    return WorkerServer(bound, service.stopped, server)


def built_in_model_side(host: str, cuda_device: int) -> "ModelSide":
    """The model code of this package.

    The rendezvous listens on `host`. `cuda_device` is used where Initialize asks for cuda.
    """
    # transformers has torch make this folder, and torch's own choice is the temporary folder.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/lockstep/torchinductor")
    # Services may write to no other part of a home, and images keep this one.
    os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/lockstep/triton")
    # After an operation of torch's that threads share, they look for the next one for milliseconds,
    # on processors that our kernels' threads want: read when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(OPENMP_LOOKS))
    from workers.collector import freeze_heap
    from workers.device import use_cuda_device
    from workers.faults import with_faults
    from workers.model_executor import ModelExecutor
    from workers.model_side import ModelSide
    from workers.parallel import join, open_rendezvous

    def join_on_device(config: "WorkerConfig", store: Any) -> "Parallel":
        if config.device == "cuda":
            use_cuda_device(cuda_device)
        return join(config, store)

    model_side = ModelSide(
        open_rendezvous=lambda world_size: open_rendezvous(world_size, host),
        join=join_on_device,
        load=ModelExecutor,
        settle=freeze_heap,
    )
    return with_faults(model_side, os.environ)


def main() -> None:
    """Serves until Shutdown, or until standard input ends; given a port, as a worker on its own."""
    arguments = _parse_arguments()
    is_alone = arguments.port is not None
    handshake = _take_stdout()
    if is_alone:
        _end_with_signals()
    else:
        end_with_stdin()
    logging.basicConfig(level=arguments.log_level, format=LOG_FORMAT, stream=sys.stderr)
    # Taken out, so that no child and no dump of the environment carries it.
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        sys.exit(f"{TOKEN_VARIABLE} is not set: it is the token that the driver sends")
    model_side = built_in_model_side(arguments.host, arguments.cuda_device)
    server = serve(
        arguments.host,
        token,
        model_side,
        arguments.cluster_certs,
        on_rank=name_process,
        port=arguments.port or 0,
        first_lease_s=FIRST_LEASE_S if is_alone else None,
    )
    with handshake:
        print(json.dumps({"port": server.port}), file=handshake)
    server.wait()
    sys.stderr.flush()
    # At once: the interpreter would wait for gRPC's threads, and one may wait for a device that
    # hangs in a collective.
    os._exit(0)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="Address to bind to.")
    parser.add_argument(
        "--port", type=int, help="Port to bind, without a driver at the end of standard input."
    )
    parser.add_argument("--cuda-device", type=int, default=0, help="Index of the GPU to use.")
    parser.add_argument(
        "--log-level",
        type=int,
        default=logging.WARNING,
        help="Level of the log, as logging counts.",
    )
    parser.add_argument("--cluster-certs", help="Folder with the certificates for mutual TLS.")
    return parser.parse_args()


def _end_with_signals() -> None:
    """At once: what runs is its driver's, which hears of it by the broken stream."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: os._exit(0))


def _take_stdout() -> TextIO:
    """Keeps standard output for the handshake; what libraries print goes to standard error."""
    handshake = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return handshake


def _with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    main()
