"""systemd units, Slurm scripts, and what README says of ports and options."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import ray.scripts.scripts
from ray._private.ray_constants import DEFAULT_PORT
from ray.scripts.symmetric_run import symmetric_run

from runtime.cli import cli
from runtime.config import EngineConfig
from runtime.frontend_config import FrontendConfig, ServeConfig
from tests.deploy_files import (
    DEPLOY,
    LONGEST_END_S,
    code_blocks,
    find_commands,
    load_yaml,
    read_command,
)

pytestmark = pytest.mark.unit

README = (DEPLOY / "README.md").read_text()
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))
PORT = "50060"  # of an engine's unit
ADDRESS = "10.0.0.7"
STUB = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
name = Path(sys.argv[0]).name
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([name, *sys.argv[1:]]), file=calls)
if name == "lockstep":  # serves for as long as the workers' step takes to begin
    while '"bash"' not in Path(os.environ["CALLS"]).read_text():
        pass
if name == "scontrol":
    print("node7", "node8", sep="\\n")
elif name == "openssl":
    print("0f" * 32)
elif "--label" in sys.argv:
    print("1: 10.0.0.8 fe80::8", "0: {ADDRESS} fe80::7", sep="\\n")
elif "hostname" in sys.argv:
    print("{ADDRESS} fe80::7")
"""


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    text = unit.read_text().replace("\\\n", " ").replace("%i", PORT)
    text = text.replace("${WORKER_HOST}", ADDRESS).replace("${CUDA_DEVICE}", "0")
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found[name].append(value)
    return found


def run_script(script: Path, folder: Path, **variables: str) -> tuple[list[list[str]], str]:
    """Runs a Slurm script where Slurm's commands only write down how they were called."""
    commands = folder / "bin"
    commands.mkdir()
    for name in ("srun", "scontrol", "openssl", "lockstep"):
        (commands / name).write_text(STUB)
        (commands / name).chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        **variables,
    }
    done = subprocess.run(
        ["bash", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return [json.loads(line) for line in calls.read_text().splitlines()], done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_what_the_command_line_takes(unit: Path) -> None:
    (start,) = settings(unit)["ExecStart"]
    program, *arguments = shlex.split(start)
    assert program == "/opt/lockstep/bin/lockstep"
    configs = read_command(arguments)
    if unit.name == "lockstep-engine@.service":
        assert configs[ServeConfig] == ServeConfig(frontends=0, engine_port=int(PORT))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_lets_its_server_drain(unit: Path) -> None:
    found = settings(unit)
    assert found["KillMode"] == ["mixed"]
    assert float(found["TimeoutStopSec"][0]) > LONGEST_END_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_a_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name.replace("@", f"@{PORT}")
    # Which has to be there.
    copy.write_text(unit.read_text().replace("/opt/lockstep/bin/lockstep", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=one", copy],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_linter_finds_nothing_in_a_slurm_script(script: Path) -> None:
    done = subprocess.run(
        ["shellcheck", "--norc", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_slurm_job_starts_ray_on_all_nodes_and_the_driver_on_the_first(tmp_path: Path) -> None:
    calls, error = run_script(
        DEPLOY / "slurm" / "ray.sbatch", tmp_path, MODEL="/models/llama", LOCKSTEP_API_KEY="key"
    )
    assert error == ""
    (run,) = (call for call in calls if "symmetric-run" in call)
    _, *run = run[run.index("ray") :]
    split = run.index("--")
    ray_part, (program, *arguments) = run[1:split], run[split + 1 :]
    assert program == "lockstep"
    engine = read_command(arguments)[EngineConfig]
    assert (engine.model, engine.tp, engine.device) == ("/models/llama", 8, "cuda")

    with symmetric_run.make_context("symmetric-run", ray_part, resilient_parsing=True) as context:
        start_options = context.params["ray_args_and_entrypoint"]
        assert context.params["address"] == engine.ray_address == f"{ADDRESS}:6379"
        assert context.params["min_nodes"] == 2
    with ray.scripts.scripts.start.make_context("start", list(start_options)) as context:
        assert context.params["num_gpus"] == 4


def test_a_slurm_job_without_ray_starts_workers_and_tells_the_driver_where(tmp_path: Path) -> None:
    calls, error = run_script(
        DEPLOY / "slurm" / "static.sbatch", tmp_path, MODEL="/models/llama", LOCKSTEP_API_KEY="key"
    )
    assert error == ""
    (loop,) = (call[-1] for call in calls if call[:1] == ["srun"] and "bash" in call)
    ((name, *options),) = find_commands(loop)
    assert name == "worker"
    assert {"--host", "--port", "--cuda-device"} <= set(options)
    (driver,) = (call[1:] for call in calls if call[0] == "lockstep")
    engine = read_command(driver)[EngineConfig]
    assert (engine.model, engine.tp, engine.launcher) == ("/models/llama", 8, "static")
    assert engine.workers is not None
    wanted = [f"{host}:{50070 + gpu}" for host in (ADDRESS, "10.0.0.8") for gpu in range(4)]
    assert engine.workers.split(",") == wanted


@pytest.mark.parametrize("missing", ["MODEL", "LOCKSTEP_API_KEY"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_slurm_job_names_what_is_not_set(script: Path, missing: str, tmp_path: Path) -> None:
    variables = {"MODEL": "/models/llama", "LOCKSTEP_API_KEY": "key"}
    del variables[missing]
    calls, error = run_script(script, tmp_path, **variables)
    assert f"{missing}: is not set" in error
    assert calls == []


def test_the_command_lines_of_the_readme_are_taken() -> None:
    commands = find_commands(code_blocks(README))
    assert [command[0] for command in commands] == ["serve"]
    for command in commands:
        read_command(command)


def test_the_options_of_the_readme_are_there() -> None:
    commands = [*cli.commands.values(), ray.scripts.scripts.start]
    there = {
        flag
        for command in commands
        for option in command.params
        for flag in (*option.opts, *option.secondary_opts)
    }
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    named = {
        option
        for code in re.findall(r"`([^`]+)`", prose)
        for option in re.findall(r"--[\w-]+", code)
    }
    assert named - there == {"--health-cmd"}  # Docker's


def test_the_ports_of_the_readme_are_the_defaults() -> None:
    rows = re.findall(r"^\| (\w[\w ]*) \| [^|]* \| `([^`]+) (--[\w-]+)` \|", README, re.MULTILINE)
    assert len(rows) == 9
    commands = {"lockstep serve": cli.commands["serve"], "ray start": ray.scripts.scripts.start}
    for port, name, flag in rows:
        (option,) = (each for each in commands[name].params if flag in each.opts)
        default = DEFAULT_PORT if (name, flag) == ("ray start", "--port") else option.default
        # 0 asks the operating system for one.
        assert (flag, port) == (flag, str(default) if default else "from the OS")


def test_prometheus_scrapes_the_http_port() -> None:
    (config,) = load_yaml(DEPLOY / "prometheus.yaml")
    (job,) = (each for each in config["scrape_configs"] if each["job_name"] == "lockstep")
    frontend = FrontendConfig()
    assert job["static_configs"] == [{"targets": [f"{frontend.host}:{frontend.http_port}"]}]
    assert "/metrics" in job["metrics_path"]
