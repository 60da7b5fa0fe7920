"""Log lines as people and machines read them."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from runtime.logs import GRPC_LOGGER, JsonFormatter, TextFormatter, escape, is_wanted

pytestmark = pytest.mark.unit

FORGERY = "lost\n2030-01-01 00:00:00,000 ERROR root: all is lost\r\x1b[2K\u2028\x85\x00"


def make_record(message: str, *args: object, **fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("runtime.x", logging.INFO, "x.py", 1, message, args, None)
    record.created = 1_700_000_000.25
    vars(record).update(fields)
    return record


def raised(error: Exception) -> tuple[type[Exception], Exception, None]:
    return (type(error), error, None)


def test_a_json_line_has_time_level_logger_message_and_fields() -> None:
    record = make_record("request %s", "ended", request_id="r1", num_tokens=3, ttft_s=0.5)
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "INFO",
        "logger": "runtime.x",
        "message": "request ended",
        "request_id": "r1",
        "num_tokens": 3,
        "ttft_s": 0.5,
    }


@pytest.mark.parametrize("name", ["color_message", "_ray_timestamp_ns"])
def test_what_libraries_add_for_themselves_is_left_out(name: str) -> None:
    record = make_record("ended", **{name: 1})
    assert name not in JsonFormatter().format(record)
    assert TextFormatter().format(record).endswith(" ended")


def test_a_text_line_ends_with_its_fields() -> None:
    record = make_record("request %s", "ended", request_id="r1", ttft_s=0.123456789, queue_s=None)
    line = TextFormatter().format(record)
    assert line.endswith(
        " INFO runtime.x: request ended request_id=r1 ttft_s=0.123457 queue_s=None"
    )


def test_a_text_field_is_not_taken_for_further_fields() -> None:
    record = make_record("ended", request_id='a" status=ok', status="cancelled", tenant="")
    line = TextFormatter().format(record)
    assert line.endswith(r'ended request_id="a\" status=ok" status=cancelled tenant=""')


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
@pytest.mark.parametrize("place", ["message", "argument", "field"])
def test_a_text_from_outside_stays_within_its_line(
    formatter: logging.Formatter, place: str
) -> None:
    record = {
        "message": make_record(FORGERY),
        "argument": make_record("engine: %s", FORGERY),
        "field": make_record("ended", request_id=FORGERY),
    }[place]
    line = formatter.format(record)
    assert line.splitlines() == [line]
    assert line.isprintable()


def test_a_text_line_shows_what_it_escapes() -> None:
    assert escape("a\nb\t\x1b\u2028é漢") == r"a\nb\t\x1b\u2028é漢"


def test_json_gives_back_the_very_text() -> None:
    record = make_record("%s", FORGERY, request_id=FORGERY)
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == line["request_id"] == FORGERY


def test_an_exception_is_a_field_of_json() -> None:
    record = make_record("it failed")
    record.exc_info = raised(ValueError("no number"))
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "it failed"
    assert line["exception"].endswith("ValueError: no number")


def test_lines_of_a_traceback_are_indented() -> None:
    record = make_record("it failed")
    record.exc_info = raised(ValueError(FORGERY))
    first, *others = TextFormatter().format(record).splitlines()
    assert first.endswith("it failed")
    assert others
    assert all(line.startswith("    ") for line in others)
    assert not any("\x1b" in line or "\r" in line for line in others)


def test_fields_that_json_has_no_form_for_are_text() -> None:
    record = make_record("x", ratio=float("nan"), place=object, names=("a",), flag=True)
    line = json.loads(JsonFormatter().format(record))
    assert (line["ratio"], line["names"], line["flag"]) == ("nan", "('a',)", True)
    assert line["place"] == "<class 'object'>"


def test_a_field_takes_no_place_of_the_records_own() -> None:
    line = json.loads(JsonFormatter().format(make_record("x", time="never", level="none")))
    assert (line["level"], line["time"][:4]) == ("INFO", "2023")


@pytest.mark.parametrize(
    ("logger", "file", "wanted"),
    [
        (GRPC_LOGGER, "src/python/grpcio/grpc/_cython/_cygrpc/grpc_string.pyx.pxi", False),
        (GRPC_LOGGER, "runtime/frontend/answer.py", True),
        ("runtime.frontend", "src/python/grpcio/grpc/_cython/_cygrpc/grpc_string.pyx.pxi", True),
    ],
)
def test_what_grpc_cannot_decode_is_not_told(logger: str, file: str, wanted: bool) -> None:
    record = make_record("Invalid encoding on %s", b"Bearer secret\xe9")
    record.name = logger
    with pytest.raises(UnicodeDecodeError) as failed:
        exec(compile("b'\\xe9'.decode()", file, "exec"))
    record.exc_info = (failed.type, failed.value, failed.tb)
    assert is_wanted(record) is wanted
    record.exc_info = raised(ValueError("another"))
    assert is_wanted(record)


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_process_logs_to_stderr_from_its_level_on(format: str) -> None:
    program = (
        "import logging; from runtime.logs import set_up_logging\n"
        f"set_up_logging(logging.WARNING, {format!r})\n"
        "logging.getLogger('a').info('quiet')\n"
        "logging.getLogger('a').warning('two\\nlines', extra={'request_id': 'r1'})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    if format == "json":
        assert json.loads(line)["request_id"] == "r1"
    else:
        assert line.endswith(r"WARNING a: two\nlines request_id=r1")
