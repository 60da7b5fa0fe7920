"""What processes that we start may know of our environment."""

import os

# Where Python, its packages and its libraries are, and how text is written; no keys, no tokens.
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")

# What frontends get by their environment, and nobody else needs.
SECRETS = frozenset({"LOCKSTEP_API_KEY", "LOCKSTEP_ENGINE_TOKEN"})


def child_environment() -> dict[str, str]:
    """For processes that run other people's templates and grammars."""
    return {name: os.environ[name] for name in KEPT if name in os.environ}


def without_secrets() -> dict[str, str]:
    """For our own processes that are no frontends."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}
