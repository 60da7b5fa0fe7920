"""How log lines are written: as text for people, as JSON for machines.

In both a record is what it says: no text of a client can begin a line that looks like another one.
"""

import json
import logging
import math
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What every record has; all else was given by `extra`. The last three come and go.
OWN_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
# uvicorn's messages once more, with colours; and Ray's own time of each record in its process.
LEFT_OUT = {"color_message", "_ray_timestamp_ns"}
GRPC_LOGGER = "grpc._cython.cygrpc"
GRPC_SOURCE = ".pyx.pxi"
# Of what is no text, and of clients that left before they were refused.
GRPC_ERRORS = {"UnicodeDecodeError", "ExecuteBatchError"}


def set_up_logging(level: int | str, format: LogFormat) -> None:
    """Has all loggers write to stderr. Changes nothing where a handler is there already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(is_wanted)
    logging.basicConfig(level=level, handlers=[handler])


def is_wanted(record: logging.LogRecord) -> bool:
    """Not so what gRPC says of clients that send no text, or leave.

    Anybody can, each time would be a traceback, and a mistyped key would be in the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    if error is None or record.name != GRPC_LOGGER or type(error).__name__ not in GRPC_ERRORS:
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Only there: a handler of ours may fail so too.
    return not any(each.endswith(GRPC_SOURCE) for each in files[-1:])


class TextFormatter(logging.Formatter):
    """One line a record, fields at its end; lines of a traceback are indented."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record))
        return escape(super().formatMessage(record) + fields)

    def formatException(self, ei: object) -> str:
        return _indent(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        return _indent(stack_info)


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, message, fields given by `extra`, exception."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record):
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)  # ASCII alone: everything else is escaped


def escape(text: str) -> str:
    r"""With what can't be printed as \n, \x1b, \u2028: it could begin a line, or move a cursor."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    for name, value in vars(record).items():
        if name not in OWN_ATTRIBUTES and name not in LEFT_OUT:
            yield name, _plain(value)


def _plain(value: object) -> object:
    """As JSON takes it; floats without digits that nobody reads."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if value is None or isinstance(value, int | str):
        return value
    return str(value)


def _quoted(value: object) -> str:
    """A text that could be taken for further fields is in quotes."""
    text = str(value)
    if isinstance(value, str) and (not text or any(each in text for each in ' ="')):
        return json.dumps(text, ensure_ascii=False)
    return text


def _indent(text: str) -> str:
    return "\n".join(f"    {escape(line)}" for line in text.split("\n"))
