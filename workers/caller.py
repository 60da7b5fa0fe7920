"""Processes that must not outlive the one that started them."""

import os
import threading

# Set by a caller that keeps the other end of our standard input open as long as it lives.
HAS_CALLER = "LOCKSTEP_HAS_CALLER"


def end_with_caller() -> None:
    """Ends this process with its caller; nothing where somebody started it by hand."""
    if os.environ.pop(HAS_CALLER, None):
        end_with_stdin()


def end_with_stdin() -> None:
    """Ends this process, from now on, when its standard input does."""
    threading.Thread(target=_wait, name="stdin", daemon=True).start()


def _wait() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
