"""What processes that we start may know of our environment."""

import os

# Where Python, its packages and its libraries are, and how text is written; no keys, no tokens.
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")

# What comes by our environment and is for those alone that we give it to.
SECRETS = frozenset({"LOCKSTEP_API_KEY", "LOCKSTEP_ENGINE_TOKEN", "LOCKSTEP_WORKER_TOKEN"})


def child_environment() -> dict[str, str]:
    """For processes that run other people's templates and grammars."""
    return {name: os.environ[name] for name in KEPT if name in os.environ}


def without_secrets() -> dict[str, str]:
    """For our own processes."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}
