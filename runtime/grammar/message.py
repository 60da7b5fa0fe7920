"""What llguidance says, made fit for an answer."""

import re

MAX_MESSAGE_CHARS = 300
_LONG_WORD = re.compile(r"(\S{24})\S{36,}")


def shorten(message: str) -> str:
    """On one line, without the long texts that it cites."""
    line = " ".join(_LONG_WORD.sub(r"\1...", message.replace("<non-verbose/>", "")).split())
    if len(line) <= MAX_MESSAGE_CHARS:
        return line
    half = MAX_MESSAGE_CHARS // 2
    return f"{line[:half]} ... {line[-half:]}"
