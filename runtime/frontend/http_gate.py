"""What stands between an HTTP server, whoever's, and a frontend's app."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from protos.auth import KeyRing
from runtime.frontend.body_space import BodySpace
from runtime.frontend.http_keys import KeyGate
from runtime.frontend.http_limits import WholeRequests
from runtime.frontend.http_refusal import Refusals
from runtime.frontend_config import FrontendConfig


def gated(
    app: ASGIApp,
    config: FrontendConfig,
    keys: KeyRing,
    refusals: Refusals,
    *,
    exempt: tuple[str, ...],
) -> ASGIApp:
    """The app for those who have a key, and for pages of the origins that may ask.

    The app sees whole requests that have a key, or whose path is in `exempt` (see KeyGate). It is
    cancelled where its client leaves before the end of the answer.
    """
    whole = WholeRequests(
        app,
        BodySpace(config.max_buffered_bytes),
        refusals,
        max_body_bytes=config.max_body_bytes,
        read_timeout_s=config.read_timeout_s,
    )
    # Strangers are refused before their body is read.
    return _shared(KeyGate(whole, keys, exempt, refusals), config.cors_origin)


def _shared(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """The app for pages of `origins` too; what browsers ask before they send a key has none."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )
