"""Clients that have environments of their own, which `make clients` makes."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.builders import demo_model_folder
from tests.cluster.stack import Server
from tests.demo_server import MODEL, ROOT, check_place, demo_server

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(1200)]

PROGRAMS = ROOT / ".venv-clients" / "bin"
SCRIPTS = ROOT / "tests" / "clients"
NPM_OPENAI = "openai@7.59.0"
TIMEOUT_S = 300
CAPITALS = {"capitals": "acc,none", "cities_again": "exact_match,stripped"}
SUMMARY = re.compile(r"^ +Selected: (\d+)/\1\n +Tested: \1$", re.MULTILINE)
PASSED = re.compile(r"^ +(\d+) generated, \1 passed$", re.MULTILINE)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with demo_server("--max-model-len=128") as server:
        yield server


def installed(name: str) -> Path:
    path = PROGRAMS / name
    if not path.exists():
        pytest.skip(f"{name} isn't installed: run `make clients`")
    return path


def run(command: Sequence[str | Path], *, timeout_s: float = TIMEOUT_S, **options: Any) -> str:
    """What a program prints that ends well."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, **options
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def check_answers(found: dict[str, Any]) -> None:
    """Of a script: it gets the same streamed, and calls and answers that follow the schema."""
    assert found["text"]
    assert found["chat"]
    assert found["streamed"] == found["chat"]
    assert found["completion_tokens"] == 8
    for call in (found["named"], found["forced"]):
        assert call["name"] == "look"
        check_place(call["arguments"])
    check_place(found["by_schema"])


@pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")), reason="node and npm aren't installed"
)
def test_openai_of_npm(server: Server, tmp_path: Path) -> None:
    run(["npm", "install", "--no-audit", "--no-fund", "--prefix", tmp_path, NPM_OPENAI])
    # Node looks for packages beside the script.
    script = shutil.copy(SCRIPTS / "openai.mjs", tmp_path)
    found = json.loads(run(["node", script, server.http_address, server.api_key]))
    check_answers(found)
    assert found["num_logprobs"] == 5
    assert found["refusal"]["status"] == 404
    assert "use /v1/chat/completions" in found["refusal"]["message"]


def test_langchain(server: Server) -> None:
    python = installed("python")
    script = SCRIPTS / "langchain_chat.py"
    found = json.loads(run([python, script, server.http_address, server.api_key]))
    check_answers(found)
    check_place(found["by_call"])
    assert found["batch"] == [found["chat"]] * 4


def test_lm_eval_completes_its_tasks(server: Server, tmp_path: Path) -> None:
    """Scores and generates; the model knows these capitals, and can say a word again."""
    model = {
        "model": MODEL,
        "base_url": f"{server.http_address}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": demo_model_folder(),
        "max_length": 128,
        "num_concurrent": 4,
    }
    run(
        [
            *(installed("lm_eval"), "--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
            *("--tasks", ",".join(CAPITALS), "--include_path", "."),
            *("--output_path", tmp_path / "out"),
        ],
        cwd=SCRIPTS / "lm_eval",
        env=os.environ
        | {
            "OPENAI_API_KEY": server.api_key,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
        },
    )
    (path,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(path.read_text())
    assert {task: found["n-samples"][task]["effective"] for task in CAPITALS} == dict.fromkeys(
        CAPITALS, 8
    )
    for task, metric in CAPITALS.items():
        assert found["results"][task][metric] >= 0.75


def test_schemathesis_finds_no_server_error(tmp_path: Path) -> None:
    """Requests of every shape that the OpenAPI document allows, and of many that it doesn't."""
    # Answers are short: how many there are is what counts.
    with demo_server("--max-model-len=20", "--max-n=2") as server:
        told = run(
            [
                *(installed("schemathesis"), "run", f"{server.http_address}/openapi.json"),
                *("--header", f"Authorization: Bearer {server.api_key}"),
                *("--checks", "not_a_server_error", "--continue-on-failure"),
                # More workers than one trip over a race of CPython 3.11's parser.
                *("--workers", "1", "--max-examples", "40", "--no-shrink", "--seed", "1"),
                *("--request-timeout", "60", "--generation-database", "none", "--no-color"),
            ],
            timeout_s=1000,
            cwd=tmp_path,
        )
    assert SUMMARY.search(told), told
    assert PASSED.search(told), told
    assert "Errors:" not in told
