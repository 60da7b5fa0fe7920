"""What `lockstep serve` gives its frontend process, and what it prints of keys."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from runtime import app
from runtime.config import EngineConfig, FrontendConfig
from runtime.engine_service import EngineServer
from runtime.errors import ConfigError, UnavailableError
from tests.frontend import TIMEOUT_S, Client, FakeEngine, make_model

pytestmark = pytest.mark.wire

READY = "import json; print(json.dumps({'port': 1234}))"
ENDED = UnavailableError("the test is over")


class EndedEngine(FakeEngine):
    """Ends as soon as it is waited for."""

    def wait(self) -> UnavailableError:
        return ENDED

    def end(self, error: UnavailableError) -> None:
        pass


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text('acme = "key-of-acme"\n')
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FrontendConfig]:
    """Has `serve` start nothing; what its frontends would be configured with."""
    configs: list[FrontendConfig] = []

    @contextmanager
    def running_engine(config: EngineConfig, **_: object) -> Iterator[FakeEngine]:
        yield EndedEngine(make_model())

    @contextmanager
    def frontend_process(
        config: FrontendConfig, address: str, token: str
    ) -> Iterator["subprocess.Popen[str]"]:
        configs.append(config)
        command = [sys.executable, "-c", READY]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            yield process

    monkeypatch.setattr(app, "running_engine", running_engine)
    monkeypatch.setattr(app, "frontend_process", frontend_process)
    return configs


def test_a_key_is_made_and_printed_where_none_is_set(
    started: list[FrontendConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.serve(EngineConfig(), FrontendConfig(port=0)) is ENDED
    (config,) = started
    assert config.api_key is not None
    printed = capsys.readouterr().out
    assert f"lockstep: api key (made for this run): {config.api_key}\n" in printed
    assert "serving tiny on 127.0.0.1:1234" in printed


@pytest.mark.parametrize("api_key", [None, "key-of-all"])
def test_no_key_is_made_or_printed_next_to_a_file(
    started: list[FrontendConfig],
    capsys: pytest.CaptureFixture[str],
    keys: Path,
    api_key: str | None,
) -> None:
    config = FrontendConfig(port=0, api_key=api_key, api_keys=str(keys))
    app.serve(EngineConfig(), config)
    assert started == [config]
    assert "key" not in capsys.readouterr().out


def test_a_wrong_file_is_told_before_anything_starts(
    started: list[FrontendConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(app, "running_engine", None)
    with pytest.raises(ConfigError, match="No such file"):
        app.serve(EngineConfig(), FrontendConfig(port=0, api_keys=str(tmp_path / "none.toml")))
    assert started == []


def test_no_key_is_on_a_command_line(keys: Path) -> None:
    config = FrontendConfig(port=0, api_key="key-of-all", api_keys=str(keys))
    command = app.frontend_command(config, "127.0.0.1:1")
    assert f"--api-keys={keys}" in command
    assert not any("key-of-all" in word for word in command)
    secrets = app.frontend_secrets(config, "engine-token")
    assert secrets == {"LOCKSTEP_ENGINE_TOKEN": "engine-token", "LOCKSTEP_API_KEY": "key-of-all"}


def test_what_is_unset_is_not_passed_on() -> None:
    command = app.frontend_command(FrontendConfig(port=0, api_key="key-of-all"), "127.0.0.1:1")
    assert not any(word.startswith("--api-keys") for word in command)
    secrets = app.frontend_secrets(FrontendConfig(), "engine-token")
    assert secrets == {"LOCKSTEP_ENGINE_TOKEN": "engine-token"}


def test_a_frontend_process_knows_its_tenants(
    server: EngineServer, engine: FakeEngine, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_API_KEY", raising=False)
    config = FrontendConfig(port=0, api_keys=str(keys))
    with app.frontend_process(config, f"127.0.0.1:{server.port}", server.token) as process:
        port = app.read_ready_line(process, TIMEOUT_S)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = Client(channel, "key-of-acme").generate("two")
            _, request = engine.added.get(timeout=TIMEOUT_S)
            call.cancel()
    assert request.tenant == "acme"
