"""A Ray of one's own with `deploy/serve_app.py` on it, as a process: `python -P -m tests.replicas`.

Reads a line of JSON with the number of CPUs and the application's arguments, prints one with its
ports, and then for each line that comes what there is of it; ends with its stdin.
"""

import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.util import placement_group_table

NAME = "lockstep"
SERVICES = ["protos.inference_pb2_grpc.add_InferenceServicer_to_server"]


def main() -> None:
    import serve_app

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints things, which don't belong between the answers
    asked = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        ray.init(
            address="local",
            num_cpus=asked["num_cpus"],
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            ports = {"http": free_port(), "grpc": free_port()}
            serve.start(
                http_options=HTTPOptions(host="127.0.0.1", port=ports["http"]),
                grpc_options=gRPCOptions(
                    port=ports["grpc"], grpc_servicer_functions=SERVICES, enable_reflection=False
                ),
            )
            serve.run(serve_app.build(asked["args"]), name=NAME, route_prefix="/")
            tell(out, ports)
            for line in sys.stdin:
                if line.strip() == "delete":
                    serve.delete(NAME)
                tell(out, state())
            serve.shutdown()
        except BaseException:
            keep_logs(Path(folder))
            raise
        finally:
            ray.shutdown()


def state() -> dict[str, Any]:
    """How many replicas are in which state, what of the CPUs is free, and which groups are left."""
    application = serve.status().applications.get(NAME)
    engines = application.deployments["Engine"].replica_states if application else {}
    groups = [each["state"] for each in placement_group_table().values()]
    return {
        "engines": {str(getattr(key, "value", key)): count for key, count in engines.items()},
        "free_cpus": ray.available_resources().get("CPU", 0),
        "groups": [each for each in groups if each != "REMOVED"],
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def tell(out: TextIO, what: dict[str, Any]) -> None:
    print(json.dumps(what), file=out, flush=True)


def keep_logs(folder: Path) -> None:
    """The last of what Serve's processes wrote, for who looks at a test that has failed."""
    for path in sorted(folder.glob("session_latest/logs/serve/*.log")):
        print(path.name, path.read_text()[-3000:], sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
