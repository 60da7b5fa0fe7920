"""A worker as a Ray actor: Ray places it and watches over it, gRPC drives it.

The driver imports this module, so that Ray can name the class: torch and the service are imported
on the worker alone. Every node needs this package installed; no code is shipped.
"""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import ray
import ray.util

from workers.server import LOG_FORMAT, WorkerServer, built_in_model_side, name_process, serve


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorAddress:
    """Where an actor was placed and where it serves."""

    node: str  # Ray's id of the node
    cuda_device: int
    host: str
    port: int


class WorkerActor:
    """One rank. `start` once, then `run` until Shutdown; the end of `run` is its death notice."""

    def __init__(
        self, environment: Mapping[str, str], log_level: int, cluster_certs: str | None
    ) -> None:
        self._cluster_certs = cluster_certs
        # What libraries print must not reach the driver's standard output.
        os.dup2(sys.stderr.fileno(), 1)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        logging.basicConfig(level=log_level, format=LOG_FORMAT, stream=sys.stderr)
        self._server: WorkerServer | None = None

    def start(self, token: str) -> ActorAddress:
        """Serves on a free port of the address by which Ray knows this node."""
        context = ray.get_runtime_context()
        devices = context.get_accelerator_ids()["GPU"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        cuda_device = cuda_index(devices[0], visible) if devices else 0
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        model_side = built_in_model_side(host, cuda_device)
        self._server = serve(host, token, model_side, self._cluster_certs, on_rank=name_process)
        return ActorAddress(
            node=context.get_node_id(), cuda_device=cuda_device, host=host, port=self._server.port
        )

    def run(self) -> None:
        """Returns after Shutdown."""
        if self._server is None:
            raise RuntimeError("run was called before start")
        self._server.wait()


def cuda_index(device: str, visible: str | None) -> int:
    """What CUDA counts Ray's `device` as, in a process whose CUDA_VISIBLE_DEVICES is `visible`.

    Ray names devices as the variable of its node does: by number or by UUID.

    Raises ValueError: it isn't among them.
    """
    if not visible:
        return int(device)
    names = [name.strip() for name in visible.split(",")]
    if device not in names:
        raise ValueError(
            f"Ray gave this rank GPU {device}, and CUDA_VISIBLE_DEVICES={visible} hides it: set "
            "the variable for Ray's node as a whole, or not at all"
        )
    return names.index(device)
