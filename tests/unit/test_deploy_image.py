"""The image is built of what there is, runs as nobody in particular, and serves."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.frontend_config import FrontendConfig
from tests.deploy_files import DEPLOY, PROJECT, REPOSITORY, read_command

pytestmark = pytest.mark.unit

DOCKERFILE = DEPLOY / "Dockerfile"
IGNORED = DEPLOY / "Dockerfile.dockerignore"
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def instructions(name: str) -> list[str]:
    lines = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    found = re.findall(rf"^{name}\s+(.*)$", re.sub(r"\\\n\s*", " ", lines), re.MULTILINE)
    return [each.strip() for each in found]


def test_a_linter_finds_nothing() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "--no-color", DOCKERFILE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bases_are_of_a_stated_version() -> None:
    stages = {each.split(" AS ")[1] for each in instructions("FROM")}
    assert {"cpu", "cuda"} <= stages
    bases = {each.split(" AS ")[0] for each in instructions("FROM")} - stages
    assert bases == {"${PYTHON_IMAGE}"}
    (base,) = (each for each in instructions("ARG") if each.startswith("PYTHON_IMAGE="))
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+", base)


def test_it_runs_as_a_user_of_its_own_that_has_a_number() -> None:
    (user,) = instructions("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    assert f"--uid {user.partition(':')[0]} " in " ".join(instructions("RUN"))


def test_it_holds_no_secrets() -> None:
    assert not [each for each in instructions("(?:ENV|ARG)") if SECRET.search(each)]


def test_it_serves_and_says_how_it_is() -> None:
    (command,) = (json.loads(each) for each in instructions("CMD"))
    assert command[0] == "lockstep"
    frontend = read_command(command[1:])[FrontendConfig]
    assert frontend.host == "0.0.0.0"
    assert instructions("EXPOSE") == [f"{frontend.port} {frontend.http_port}"]
    (check,) = instructions("HEALTHCHECK")
    assert f"http://127.0.0.1:{frontend.http_port}/health" in check


def test_it_is_made_of_what_there_is() -> None:
    sources = [
        source.rstrip("/")
        for each in instructions("COPY")
        if not each.startswith("--from")
        for source in each.split()[:-1]
    ]
    assert not [each for each in sources if not (REPOSITORY / each).exists()]
    allowed = {line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")}
    assert set(sources) == allowed
    (extras,) = (each for each in instructions("ARG") if each.startswith("EXTRAS="))
    assert set(extras.partition("=")[2].split(",")) <= set(PROJECT["optional-dependencies"])


def test_all_files_name_the_image_of_this_version() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            for tag in re.findall(r"lockstep:(\S+?)-(?:cpu|cuda)", path.read_text()):
                assert (path.name, tag) == (path.name, PROJECT["version"])
