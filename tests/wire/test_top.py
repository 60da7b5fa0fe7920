"""`lockstep top` against a frontend."""

from io import StringIO

import pytest
from rich.console import Console

from runtime.errors import ConfigError, UnavailableError
from runtime.top import fetch, render, show
from tests.frontend import API_KEY, RunningFrontend

pytestmark = pytest.mark.wire


def test_it_shows_what_the_engine_tells(
    frontend: RunningFrontend, capsys: pytest.CaptureFixture[str]
) -> None:
    show(f"http://{frontend.http_address}", API_KEY, interval_s=1.0, once=True)
    shown = capsys.readouterr().out
    for word in ("tiny at", "running of", "waiting", "blocks", "schedule", "TTFT", "ranks"):
        assert word in shown


def test_rates_are_between_two_looks(frontend: RunningFrontend) -> None:
    now = fetch(f"http://{frontend.http_address}", API_KEY)
    (address,) = now["engines"]
    engine = now["engines"][address]
    before = now | {
        "engines": {
            address: engine | {"num_output_tokens": engine["num_output_tokens"] - 10},
        }
    }
    assert ", 5.0/s" in text_of(render(now, before, 2.0))
    assert "/s" not in text_of(render(before, now, 2.0)), "the engine has begun anew"


def test_a_wrong_key_and_nobody_there_are_told_apart(frontend: RunningFrontend) -> None:
    with pytest.raises(ConfigError, match="takes no such key"):
        fetch(f"http://{frontend.http_address}", "wrong")
    with pytest.raises(UnavailableError, match="can't be reached"):
        fetch("http://127.0.0.1:1", API_KEY)


def text_of(rendered: object) -> str:
    written = StringIO()
    Console(width=200, file=written).print(rendered)
    return written.getvalue()
