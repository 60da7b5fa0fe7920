"""How many connections the system lets a process have: each is an open file."""

import logging
import resource

from runtime.frontend.http_connection import MAX_TOLD

logger = logging.getLogger(__name__)

# What is open beside connections.
OTHER_FILES = 256
# Of a connection at gRPC's port: its own, and both ends of that to the server behind it.
FILES_OF_GRPC = 3


def allow_connections(max_connections: int) -> int:
    """Has the system allow so many at the HTTP port, and at gRPC's.

    Returns how many it does allow, where those are less, with a warning.
    """
    needed = (1 + FILES_OF_GRPC) * max_connections + MAX_TOLD + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == needed:
        return max_connections
    allowed = max(1, (most - MAX_TOLD - OTHER_FILES) // (1 + FILES_OF_GRPC))
    logger.warning(
        "max_connections=%d is more than the system allows, which is %d: a process may have %d "
        "files open (ulimit -Hn)",
        max_connections,
        allowed,
        hard,
    )
    return allowed
