"""What a helper process may know of its parent's environment."""

import os

# Where Python, its packages and its libraries are, and how text is written; no keys, no tokens.
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")


def child_environment() -> dict[str, str]:
    """For processes that run other people's templates and grammars."""
    return {name: os.environ[name] for name in KEPT if name in os.environ}
