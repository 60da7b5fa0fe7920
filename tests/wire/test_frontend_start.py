"""`lockstep frontend`, until it serves."""

import os
import signal
import socket
import threading

import pytest
import uvloop

from runtime.commands.frontend import frontend, serve_until_signal
from runtime.errors import ConfigError
from runtime.frontend_config import FrontendConfig
from tests.ended import ended

pytestmark = pytest.mark.wire


def test_sigterm_ends_a_frontend_whose_engine_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def end_it_once_it_connects() -> None:
            with silent.accept()[0]:
                os.kill(os.getpid(), signal.SIGTERM)

        address = f"127.0.0.1:{silent.getsockname()[1]}"
        config = FrontendConfig(port=0, http_port=0, api_key="key")
        threading.Thread(target=end_it_once_it_connects, daemon=True).start()
        uvloop.run(ended(serve_until_signal(config, [address], "engine-token")))


@pytest.mark.parametrize("token", ["schl\u00fcssel", "two\nlines", " token"])
def test_a_token_that_cannot_be_sent_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("LOCKSTEP_ENGINE_TOKEN", token)
    with pytest.raises(ConfigError, match=r"LOCKSTEP_ENGINE_TOKEN .*printable ASCII") as raised:
        frontend.main(["--engine=127.0.0.1:1", "--api-key=key"], standalone_mode=False)
    assert token not in str(raised.value)
