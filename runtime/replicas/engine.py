"""One replica: an engine and its port."""

import gc
import logging
import threading
from contextlib import ExitStack

from runtime.collector import calm_collector
from runtime.config import EngineConfig
from runtime.credentials import cluster_server_credentials
from runtime.driver import running_engine
from runtime.engine_service import EngineServer
from runtime.errors import LockstepError
from runtime.replicas.scaling import load_of

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
# Frontends ask once a second.
LEAVE_S = 3.0
# Beside the drain: that, and then streams and workers end.
STOP_S = 15.0


class EngineReplica:
    """Serves frontends from when it is made until `close`.

    Raises what `running_engine` does.
    """

    def __init__(self, config: EngineConfig, *, host: str, token: str) -> None:
        self._is_closing = threading.Event()
        credentials = cluster_server_credentials(config.cluster_certs)
        name = f"[{host}]" if ":" in host else host
        with ExitStack() as stack:
            self._engine = stack.enter_context(
                running_engine(config, quiet=True, on_idle=gc.collect)
            )
            self._server = EngineServer(
                self._engine, token=token, host=name, port=0, credentials=credentials
            )
            stack.callback(self._server.stop, grace_s=STOP_GRACE_S)
            self._server.start()
            calm_collector()
            self._cleanup = stack.pop_all()
        self.address = f"{name}:{self._server.port}"

    def load(self) -> dict[str, float]:
        """By which the number of replicas goes."""
        return load_of(self._engine.stats())

    def why_ended(self) -> LockstepError | None:
        """None while the engine works, or recovers, and once `close` was called."""
        return None if self._is_closing.is_set() else self._engine.wait(0)

    def close(self, drain_timeout_s: float) -> None:
        """Lets requests finish for so long, and ends everything. May be called twice.

        Those that haven't finished go on at another replica: their frontend has what they need.
        New ones are taken for LEAVE_S, by when frontends know of it and of who is there instead.
        """
        ended = self.why_ended()
        self._is_closing.set()
        if ended is None:
            ended = self._engine.wait(LEAVE_S)
        self._engine.drain()
        if ended is None and not self._engine.wait_idle(drain_timeout_s):
            logger.warning("requests haven't finished within %g s and move", drain_timeout_s)
        self._cleanup.close()
