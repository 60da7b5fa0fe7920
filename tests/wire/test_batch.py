"""`lockstep batch`, its command and service, over an engine that says what the test wants."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import runtime.batch.app
from runtime.cli import EXIT_CONFIG, EXIT_ERROR, main
from runtime.errors import CapacityError, ModelOutputError
from tests.batches import line, read, write
from tests.openai import CHAT, CHAT_TEMPLATE, COMPLETIONS, SayingEngine, write_model

pytestmark = pytest.mark.wire

MESSAGES = [{"role": "user", "content": "hello"}]
DONE_BEFORE = "the same command again does the rest"


class Batch:
    """A folder with files of a batch, and the command over them."""

    def __init__(self, folder: Path, engine: SayingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.engine = engine
        self._monkeypatch = monkeypatch

        @contextmanager
        def running_engine(*_: Any, **__: Any) -> Iterator[SayingEngine]:
            yield engine

        monkeypatch.setattr(runtime.batch.app, "running_engine", running_engine)

    def run(self, *options: str) -> int:
        """Over input.jsonl and output.jsonl; the exit code."""
        files = [str(self.folder / "input.jsonl"), str(self.folder / "output.jsonl")]
        self._monkeypatch.setattr(sys, "argv", ["lockstep", "batch", *files, *options])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    def write(self, *lines: str) -> None:
        write(self.folder / "input.jsonl", lines)

    def answers(self) -> dict[str, Any]:
        """Bodies by custom_id."""
        results = read(self.folder / "output.jsonl")
        return {each["custom_id"]: each["response"]["body"] for each in results}

    def errors(self) -> dict[int, str]:
        """Messages by line."""
        results = read(self.folder / "output.errors.jsonl")
        return {each["line"]: each["error"]["message"] for each in results}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batch(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    return Batch(tmp_path, SayingEngine(model), monkeypatch)


@pytest.fixture
def template(tmp_path: Path) -> list[str]:
    path = tmp_path / "template.jinja"
    path.write_text(CHAT_TEMPLATE)
    return ["--chat-template", str(path)]


def chat_line(custom_id: str, **body: Any) -> str:
    return line(custom_id, url=CHAT, body={"messages": MESSAGES} | body)


def test_chats_and_completions_are_answered_as_over_http(
    batch: Batch, template: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    batch.engine.texts = ["the fox"]
    batch.write(
        chat_line("chat", max_completion_tokens=50, model="tiny"),
        line("text", url=COMPLETIONS, body={"prompt": "two words", "max_tokens": 50}),
    )
    assert batch.run(*template) == 0
    answers = batch.answers()
    message = answers["chat"]["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "the fox")
    assert answers["chat"]["object"] == "chat.completion"
    assert answers["text"]["choices"][0]["text"] == "the fox"
    assert answers["text"]["usage"]["completion_tokens"] > 0
    prompts = {
        batch.engine.tokenizer.decode(request.prompt_token_ids) for request in batch.engine.requests
    }
    assert prompts == {"[user] hello [assistant]", "two words"}
    assert capsys.readouterr().err == "lockstep: 2 answered, 0 were done before\n"


def test_bad_requests_are_errors_of_their_lines(
    batch: Batch, template: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    batch.write(chat_line("a", stream=True), chat_line("b"), line("c", url="/v1/embeddings"))
    assert batch.run(*template) == 0
    assert batch.answers().keys() == {"b"}
    assert "2 errors: see " in capsys.readouterr().err
    errors = batch.errors()
    assert errors.keys() == {1, 3}
    assert errors[1].startswith("stream=true can't be served here")
    assert errors[3].startswith("url='/v1/embeddings' must be")
    batch.write(chat_line("a", stream=True), chat_line("b"), line("c", url="/v1/embeddings"), "{")
    assert batch.run(*template) == 0
    assert "lockstep: 0 answered, 3 were done before, 1 error: see " in capsys.readouterr().err


def test_what_the_model_spoils_is_an_error_of_its_line(batch: Batch, template: list[str]) -> None:
    batch.engine.failure = ModelOutputError("the logits are NaN")
    batch.engine.fails_after = 0
    batch.write(chat_line("a"))
    assert batch.run(*template) == 0
    assert batch.errors() == {1: "the logits are NaN"}


def test_lines_that_are_left_are_told_by_the_exit_code(
    batch: Batch, template: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    batch.engine.failure = CapacityError("the queue is full", retry_after_s=1)
    batch.engine.fails_after = 0
    batch.write(chat_line("a"))
    assert batch.run(*template) == EXIT_ERROR
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "lockstep: 0 answered, 0 were done before",
        f"lockstep: 1 request failed (the queue is full): {DONE_BEFORE}",
    ]
    assert batch.errors() == {}
    batch.engine.failure = None
    assert batch.run(*template) == 0
    assert batch.answers().keys() == {"a"}


def test_a_missing_chat_template_is_the_operators_to_mend(
    batch: Batch, template: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    batch.write(line("text"), chat_line("chat"), line("last"))
    assert batch.run("--max-concurrency", "1") == EXIT_CONFIG
    assert capsys.readouterr().err == (
        "lockstep: model tiny has no chat template, and the input has chats: add "
        "--chat-template FILE to the same command\n"
    )
    assert batch.errors() == {}
    assert batch.run(*template) == 0
    assert batch.answers().keys() == {"text", "chat", "last"}


def test_a_broken_chat_template_is_the_operators_to_mend(
    batch: Batch, model: Path, template: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "chat_template.jinja").write_text("{% for %}")
    batch.write(chat_line("a"), chat_line("b"))
    try:
        assert batch.run() == EXIT_CONFIG
    finally:
        (model / "chat_template.jinja").unlink()
    assert "lockstep: the model's chat template can't be read" in capsys.readouterr().err
    assert batch.errors() == {}
    assert batch.run(*template) == 0
    assert batch.answers().keys() == {"a", "b"}


def test_another_inputs_results_are_refused_before_an_engine_is_started(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.write(line("a", body={"prompt": "one"}))
    assert batch.run() == 0
    batch.write(line("a", body={"prompt": "two words"}))
    monkeypatch.delattr(runtime.batch.app, "running_engine")
    capsys.readouterr()
    assert batch.run() == EXIT_CONFIG
    assert capsys.readouterr().err == (
        "lockstep: output belongs to another input: line 1 isn't the one that its result "
        "answers; give another output, or the input as it was\n"
    )


def test_an_input_that_cant_be_used_leaves_no_files(batch: Batch) -> None:
    assert batch.run() == EXIT_CONFIG
    assert list(batch.folder.iterdir()) == []
    os.mkfifo(batch.folder / "input.jsonl")
    assert batch.run() == EXIT_CONFIG
    assert [each.name for each in batch.folder.iterdir()] == ["input.jsonl"]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runtime", "batch", "/dev/stdin", str(tmp_path / "output")]
    done = subprocess.run(
        command, input=line("a"), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == EXIT_CONFIG
    assert done.stderr == (
        "lockstep: input='/dev/stdin' must be a regular file, as it is read twice: write the "
        "requests to one first\n"
    )
