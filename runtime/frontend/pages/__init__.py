"""Static pages of the HTTP port: the status page with its playground."""

from collections.abc import Mapping
from importlib.resources import files

TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}


def pages() -> Mapping[str, tuple[str, bytes]]:
    """Content type and content by address; the page itself is at `/`."""
    found: dict[str, tuple[str, bytes]] = {}
    for file in files(__package__).iterdir():
        kind = TYPES.get(f".{file.name.rpartition('.')[2]}")
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = (kind, file.read_bytes())
    return found
