"""Public ports before there is a frontend."""

import socket
from contextlib import closing
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.frontend_config import FrontendConfig
from runtime.ports import reserved

pytestmark = pytest.mark.wire

HOST = "127.0.0.1"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text('tenant = "key"\n')
    return str(path)


def port_of_a_server_that_has_ended() -> int:
    """Whose connections the system keeps for a minute, as the server closed them first."""
    with closing(socket.create_server((HOST, 0))) as server:
        number: int = server.getsockname()[1]
        with closing(socket.create_connection((HOST, number))) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    return number


def test_a_port_may_have_been_another_servers(keys: str) -> None:
    number = port_of_a_server_that_has_ended()
    # It is as busy as it can be without a listener.
    with closing(socket.socket()) as plain, pytest.raises(OSError, match="in use"):
        plain.bind((HOST, number))
    with reserved(FrontendConfig(host=HOST, port=number, http_port=0, api_keys=keys)) as config:
        assert config.port == number
        assert config.http_port != number


def test_a_port_that_somebody_listens_at_is_refused(keys: str) -> None:
    with closing(socket.create_server((HOST, 0))) as server:
        number = server.getsockname()[1]
        config = FrontendConfig(host=HOST, port=number, http_port=0, api_keys=keys)
        with pytest.raises(ConfigError, match=f"port={number} can't be bound"), reserved(config):
            pass
