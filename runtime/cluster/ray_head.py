"""Starts a Ray of ours, tells its address, and ends it when standard input ends.

A process of its own, run by path, since Ray forks its own processes: with gRPC's threads at work
around it, as in a driver, a fork may die before it has become what it was to be.
"""

import json
import logging
import os
import sys
from typing import Any

import ray


def main() -> None:
    """Takes options of `ray.init` as JSON; writes `address`, or `error` where there is none."""
    options = json.loads(sys.argv[1])
    # Standard output is the driver's; what Ray and its processes print goes where errors go.
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        said = _start(options)
        output.write(json.dumps(said) + "\n")
    if "error" in said:
        sys.exit(1)
    sys.stdin.buffer.read()
    ray.shutdown()


def _start(options: dict[str, Any]) -> dict[str, str]:
    # Ray warns that it asks for a token, which is what we want.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address="local", configure_logging=False, log_to_driver=False, **options)
    except Exception as error:
        return {"error": str(error)}
    return {"address": ray.get_runtime_context().gcs_address}


if __name__ == "__main__":
    main()
