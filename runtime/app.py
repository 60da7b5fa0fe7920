"""`lockstep serve`: engine and frontend, started together, ended together."""

import gc
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace

from runtime.collector import calm_collector
from runtime.config import EngineConfig, FrontendConfig
from runtime.driver import running_engine
from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.errors import ConfigError, LockstepError, UnavailableError
from runtime.frontend.keys import read_tenants
from runtime.interrupts import Interrupted

ENGINE_TOKEN_VARIABLE = "LOCKSTEP_ENGINE_TOKEN"
API_KEY_VARIABLE = "LOCKSTEP_API_KEY"
ENGINE_STOP_S = 1.0
FRONTEND_STOP_S = 3.0


def serve(engine_config: EngineConfig, frontend_config: FrontendConfig) -> LockstepError | None:
    """Serves until a signal comes, or the engine or its frontend ends; returns what ended it.

    Raises ConfigError: the configuration can't be served; nothing is left running.
    """
    check_port_is_free(frontend_config.host, frontend_config.port)
    made_key = None
    if not read_tenants(frontend_config):
        made_key = secrets.token_urlsafe(24)
        frontend_config = replace(frontend_config, api_key=made_key)
    with (
        running_engine(engine_config, on_idle=gc.collect) as engine,
        engine_server(engine) as server,
    ):
        address = f"127.0.0.1:{server.port}"
        with frontend_process(frontend_config, address, server.token) as frontend:
            port = read_ready_line(frontend, engine_config.startup_timeout_s)
            watch = threading.Thread(
                target=end_engine_with, args=(engine, frontend), name="frontend-watch", daemon=True
            )
            watch.start()
            calm_collector()
            try:
                if made_key is not None:
                    print(f"lockstep: api key (made for this run): {made_key}", flush=True)
                host = frontend_config.host
                shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                print(f"lockstep: serving {engine.model.name} on {shown}", flush=True)
                ended = engine.wait()
            except Interrupted:  # the good end of a server
                return None
            # Its clients are to hear why, by way of the frontend, which ends with its engine.
            server.stop(grace_s=ENGINE_STOP_S)
            wait_for_end(frontend)
            return ended


@contextmanager
def engine_server(engine: Engine) -> Iterator[EngineServer]:
    server = EngineServer(engine, token=secrets.token_urlsafe(24))
    server.start()
    try:
        yield server
    finally:
        server.stop(grace_s=ENGINE_STOP_S)


def check_port_is_free(host: str, port: int) -> None:
    """Finds out before minutes of loading. Raises ConfigError where the port can't be bound."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with closing(socket.create_server((host, port), family=family)):
            pass
    except OSError as error:
        raise ConfigError(
            f"host={host} port={port} can't be bound ({error.strerror}): set --port or --host"
        ) from error


@contextmanager
def frontend_process(
    config: FrontendConfig, engine_address: str, engine_token: str
) -> Iterator["subprocess.Popen[str]"]:
    """A frontend in a process of its own, ended on the way out."""
    process = subprocess.Popen(
        frontend_command(config, engine_address),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | frontend_secrets(config, engine_token),
        start_new_session=True,  # the terminal's Ctrl-C is the driver's to act on
    )
    try:
        yield process
    finally:
        process.terminate()
        wait_for_end(process)
        assert process.stdout is not None
        process.stdout.close()


def frontend_command(config: FrontendConfig, engine_address: str) -> list[str]:
    flags = [
        f"--{field.name.replace('_', '-')}={value}"
        for field in fields(config)
        # A key is never on a command line, where everybody reads it.
        if field.name != "api_key" and (value := getattr(config, field.name)) is not None
    ]
    # -P: a folder called `runtime` in the current directory must not be taken for ours.
    python = [sys.executable, "-P", "-m", "runtime"]
    return [*python, "frontend", f"--engine={engine_address}", *flags]


def frontend_secrets(config: FrontendConfig, engine_token: str) -> dict[str, str]:
    """What the process gets by its environment."""
    secrets_of_child = {ENGINE_TOKEN_VARIABLE: engine_token}
    if config.api_key is not None:
        secrets_of_child[API_KEY_VARIABLE] = config.api_key
    return secrets_of_child


def wait_for_end(process: "subprocess.Popen[str]") -> None:
    """Waits for FRONTEND_STOP_S, then kills."""
    try:
        process.wait(FRONTEND_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_ready_line(frontend: "subprocess.Popen[str]", timeout_s: float) -> int:
    """Waits until the frontend serves; returns its port. One that is late is killed."""
    assert frontend.stdout is not None
    late = threading.Timer(timeout_s, frontend.kill)
    late.daemon = True
    late.start()
    line = frontend.stdout.readline()
    late.cancel()
    if not line:
        raise UnavailableError(f"the frontend ended with exit code {frontend.wait()}")
    port: int = json.loads(line)["port"]
    return port


def end_engine_with(engine: Engine, frontend: "subprocess.Popen[str]") -> None:
    engine.end(UnavailableError(f"the frontend ended with exit code {frontend.wait()}"))
