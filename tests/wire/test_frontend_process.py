"""What `lockstep serve` gives its frontend processes, what it prints, and how it drains."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from runtime import app, frontend_processes
from runtime.addresses import read_addresses
from runtime.config import EngineConfig
from runtime.engine_service import EngineServer
from runtime.errors import ConfigError, LockstepError, UnavailableError
from runtime.frontend_config import FrontendConfig, ServeConfig
from runtime.frontend_processes import Process, frontend_command, frontend_secrets
from runtime.interrupts import Interrupted, interruptible
from runtime.ports import reserved
from tests.frontend import TIMEOUT_S, Client, FakeEngine, make_model

pytestmark = pytest.mark.wire

READY = [sys.executable, "-S", "-c", "print('{}', flush=True); import signal; signal.pause()"]
ENDED = UnavailableError("the test is over")
ANY_PORTS = FrontendConfig(port=0, http_port=0)


class EndedEngine(FakeEngine):
    """Ends as soon as it is waited for."""

    def wait(self, timeout_s: float | None = None) -> UnavailableError:
        return ENDED

    def end(self, error: UnavailableError) -> None:
        pass


class DrainedEngine(FakeEngine):
    """SIGTERM comes while it is waited for."""

    def __init__(self, failure: UnavailableError | None = None) -> None:
        super().__init__(make_model())
        self.seen: list[str] = []
        self._failure = failure

    def wait(self, timeout_s: float | None = None) -> LockstepError | None:
        if timeout_s:  # in turns, and not to look whether it has failed
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(TIMEOUT_S)
        return self._failure

    def drain(self) -> None:
        self.seen.append("engine")

    def wait_idle(self, timeout_s: float) -> bool:
        self.seen.append("idle")
        return True


class DrainedFrontends:
    """Its draining may be interrupted."""

    def __init__(self, engine: DrainedEngine, second: signal.Signals | None = None) -> None:
        self._engine = engine
        self._second = second

    def drain(self, timeout_s: float) -> None:
        self._engine.seen.append("frontends")
        if self._second is not None:
            os.kill(os.getpid(), self._second)
            threading.Event().wait(TIMEOUT_S)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text('acme = "key-of-acme"\n')
    return path


class Started:
    """Commands and environments of frontends that were started in name only."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.folders: list[Path] = []

    def start(self, command: list[str], environment: dict[str, str]) -> Process:
        self.commands.append(command)
        self.environments.append(environment)
        if folder := environment.get("PROMETHEUS_MULTIPROC_DIR"):
            assert Path(folder).is_dir()
            self.folders.append(Path(folder))
        return real_start(READY, environment)


real_start = frontend_processes.start_frontend


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Has `serve` start nothing that costs."""
    monkeypatch.delenv("LOCKSTEP_ENGINE_TOKEN", raising=False)
    seen = Started()

    @contextmanager
    def running_engine(config: EngineConfig, **_: object) -> Iterator[FakeEngine]:
        yield EndedEngine(make_model())

    monkeypatch.setattr(app, "running_engine", running_engine)
    monkeypatch.setattr(app, "FRONTEND_STOP_S", 0)  # these don't end with their engine
    monkeypatch.setattr(frontend_processes, "start_frontend", seen.start)
    return seen


def test_a_key_is_made_and_printed_where_none_is_set(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.serve(EngineConfig(), ANY_PORTS, ServeConfig()) is ENDED
    (environment,) = started.environments
    printed = capsys.readouterr().out
    key = environment["LOCKSTEP_API_KEY"]
    assert f"lockstep: api key (made for this run): {key}\n" in printed
    assert "engine token" not in printed
    (command,) = started.commands
    port, http_port = (flag_of(command, name) for name in ("port", "http-port"))
    last = printed.splitlines()[-1]
    assert last == (
        f"lockstep: serving tiny on 127.0.0.1:{port} (gRPC) and http://127.0.0.1:{http_port} (HTTP)"
    )


def flag_of(command: list[str], name: str) -> str:
    (found,) = [each for each in command if each.startswith(f"--{name}=")]
    return found.partition("=")[2]


@pytest.mark.parametrize("api_key", [None, "key-of-all"])
def test_no_key_is_made_or_printed_next_to_a_file(
    started: Started, capsys: pytest.CaptureFixture[str], keys: Path, api_key: str | None
) -> None:
    config = FrontendConfig(port=0, http_port=0, api_key=api_key, api_keys=str(keys))
    app.serve(EngineConfig(), config, ServeConfig())
    assert started.environments[0].get("LOCKSTEP_API_KEY") == api_key
    assert flag_of(started.commands[0], "api-keys") == str(keys)
    assert "key" not in capsys.readouterr().out


def test_a_wrong_file_is_told_before_anything_starts(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(app, "running_engine", None)
    config = FrontendConfig(port=0, http_port=0, api_keys=str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="No such file"):
        app.serve(EngineConfig(), config, ServeConfig())
    assert started.commands == []


@pytest.mark.parametrize("name", ["port", "http_port"])
def test_a_port_in_use_is_told_before_anything_starts(started: Started, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = FrontendConfig(**{"port": 0, "http_port": 0, name: port})
        with pytest.raises(
            ConfigError, match=f"{name}={port} can't be bound.*set --http-port|port"
        ):
            app.serve(EngineConfig(), config, ServeConfig())
        with pytest.raises(ConfigError, match=f"engine_port={port} can't be bound"):
            app.serve(EngineConfig(), ANY_PORTS, ServeConfig(engine_port=port))
    assert started.commands == []


def test_frontends_share_ports_and_the_numbers_that_they_count(started: Started) -> None:
    app.serve(EngineConfig(), ANY_PORTS, ServeConfig(frontends=3), verbose=True)
    assert len(started.commands) == 3
    assert started.commands[0] == started.commands[1] == started.commands[2]
    assert {"--reuse-port", "--verbose"} <= set(started.commands[0])
    # Of the engine that they have it is known when it is gone for good.
    assert flag_of(started.commands[0], "resume-timeout-s") == "0.0"
    (folder,) = set(started.folders)
    assert not folder.exists()


def test_a_single_frontend_keeps_its_numbers_to_itself(started: Started) -> None:
    app.serve(EngineConfig(), ANY_PORTS, ServeConfig())
    assert started.folders == []


def test_without_frontends_the_engine_is_told_of(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    app.serve(EngineConfig(), FrontendConfig(), ServeConfig(frontends=0))
    assert started.commands == []
    token, serving = capsys.readouterr().out.splitlines()
    assert token.startswith("lockstep: engine token (made for this run): ")
    assert serving.startswith("lockstep: serving tiny to frontends on 127.0.0.1:")


def test_the_engines_token_can_be_given(
    started: Started, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_ENGINE_TOKEN", "token-of-the-operator")
    app.serve(EngineConfig(), ANY_PORTS, ServeConfig())
    assert started.environments[0]["LOCKSTEP_ENGINE_TOKEN"] == "token-of-the-operator"
    assert "token" not in capsys.readouterr().out
    monkeypatch.setenv("LOCKSTEP_ENGINE_TOKEN", "schlüssel")
    with pytest.raises(ConfigError, match=r"LOCKSTEP_ENGINE_TOKEN .*printable ASCII"):
        app.serve(EngineConfig(), ANY_PORTS, ServeConfig())


def test_no_key_is_on_a_command_line(keys: Path) -> None:
    config = FrontendConfig(port=0, api_key="key-of-all", api_keys=str(keys))
    command = frontend_command(config, "127.0.0.1:1", verbose=False)
    assert f"--api-keys={keys}" in command
    assert "--no-reflection" in command
    assert not any("key-of-all" in word for word in command)
    secrets = frontend_secrets(config, "engine-token")
    assert secrets == {"LOCKSTEP_ENGINE_TOKEN": "engine-token", "LOCKSTEP_API_KEY": "key-of-all"}


def test_what_is_unset_is_not_passed_on() -> None:
    config = FrontendConfig(
        port=0, api_key="key-of-all", reflection=True, cors_origin=("https://a.org", "http://b:1")
    )
    command = frontend_command(config, "127.0.0.1:1", verbose=False)
    assert "--reflection" in command
    origins = ["--cors-origin=https://a.org", "--cors-origin=http://b:1"]
    assert [word for word in command if word.startswith("--cors-origin")] == origins
    assert not any(word.startswith(("--api-keys", "--tls", "--verbose")) for word in command)
    secrets = frontend_secrets(FrontendConfig(), "engine-token")
    assert secrets == {"LOCKSTEP_ENGINE_TOKEN": "engine-token"}


def test_a_frontend_process_knows_its_tenants_and_its_ports(
    server: EngineServer, engine: FakeEngine, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_API_KEY", raising=False)
    with (
        reserved(FrontendConfig(port=0, http_port=0, api_keys=str(keys))) as config,
        frontend_processes.running_frontends(
            config,
            count=1,
            engine_address=f"127.0.0.1:{server.port}",
            engine_token=server.token,
            verbose=False,
            ready_timeout_s=TIMEOUT_S,
            on_lost=lambda error: None,
        ),
        grpc.insecure_channel(f"127.0.0.1:{config.port}") as channel,
    ):
        call = Client(channel, "key-of-acme").generate("two")
        _, request = engine.added.get(timeout=TIMEOUT_S)
        call.cancel()
    assert request.tenant == "acme"


def test_sigterm_drains_engine_and_frontends_and_then_ends() -> None:
    engine = DrainedEngine()
    with pytest.raises(Interrupted), interruptible():
        app.wait_for_end(engine, DrainedFrontends(engine), TIMEOUT_S)
    assert engine.seen == ["engine", "frontends", "idle"]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_draining(second: signal.Signals) -> None:
    engine = DrainedEngine()
    with pytest.raises(Interrupted), interruptible():
        app.wait_for_end(engine, DrainedFrontends(engine, second), TIMEOUT_S)
    assert engine.seen == ["engine", "frontends"]


def test_an_engine_that_fails_while_it_drains_is_told() -> None:
    engine = DrainedEngine(ENDED)
    with interruptible():
        assert app.wait_for_end(engine, DrainedFrontends(engine), TIMEOUT_S) is ENDED


def test_engines_are_named_by_their_addresses() -> None:
    assert read_addresses("engine", "one:1, 10.0.0.2:50 ,[::1]:65535") == [
        "one:1",
        "10.0.0.2:50",
        "[::1]:65535",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "engine='' must be HOST:PORT"),
        ("host", "engine='host' must be HOST:PORT"),
        (":1", "engine=':1' must be"),
        ("host:1,", "engine='' must be"),
        ("host:0", r"engine='host:0' must be HOST:PORT, with a port in \[1, 65535\]"),
        ("host:1,host:2,host:1", "has host:1 twice"),
    ],
)
def test_what_names_no_engine_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_addresses("engine", text)
