"""Who may use the HTTP port."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from protos.auth import HEADER, KeyRing
from runtime.frontend.http_refusal import Refusals
from runtime.frontend.openai.errors import STATUSES

SCHEME = "bearer"
MESSAGE = "this request needs the header `Authorization: Bearer KEY` with a key of this server"

Headers = Iterable[tuple[bytes, bytes]]


class KeyGate:
    """Lets requests with a key pass, and sets scope["tenant"] to whose it is.

    Without one only the paths in `exempt` can be asked for, and what lies below those that end
    in a slash. `/` is that page alone. Their tenant is "".
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, exempt: tuple[str, ...], refusals: Refusals
    ) -> None:
        self._app = app
        self._refusals = refusals
        self._keys = keys
        self._pages = frozenset(exempt)
        self._folders = tuple(path for path in exempt if path.endswith("/") and path != "/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self._tenant_of(scope["headers"])
        if tenant is None and not self._is_exempt(scope["path"]):
            challenge = {"www-authenticate": "Bearer"}
            await self._refusals.refuse(receive, send, STATUSES[401], MESSAGE, challenge)
            return
        scope["tenant"] = tenant or ""
        await self._app(scope, receive, send)

    def _tenant_of(self, headers: Headers) -> str | None:
        for name, value in headers:
            scheme, _, key = value.decode("latin-1").partition(" ")
            if name == HEADER.encode() and scheme.lower() == SCHEME:
                tenant = self._keys.name_of_token(key.strip())
                if tenant is not None:
                    return tenant
        return None

    def _is_exempt(self, path: str) -> bool:
        return path in self._pages or path.startswith(self._folders)
