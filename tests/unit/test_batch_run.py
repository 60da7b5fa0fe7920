"""Lines in, lines out: what is bad, what is left, what a rerun does."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import CapacityError, ConfigError, InvalidRequestError, UnavailableError
from tests.batches import MAX_BYTES, echo, line, number_of, read, run, write

pytestmark = pytest.mark.unit


def test_answers_are_in_openais_form(tmp_path: Path) -> None:
    write(tmp_path / "input.jsonl", [line("a"), "", line("b", body={"model": "other"})])
    tally = run(tmp_path)
    first, second = sorted(read(tmp_path / "output.jsonl"), key=lambda each: each["custom_id"])
    assert [number_of(first), number_of(second)] == [1, 3]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"]
    assert first["response"]["body"]["body"] == {"model": "tiny", "prompt": "hi"}
    assert second["response"]["body"]["body"] == {"model": "other"}
    assert (tally.num_answered, tally.num_errors, tally.reason) == (2, 0, None)


@pytest.mark.parametrize(
    ("bad", "custom_id", "message"),
    [
        ("{", None, "the line isn't JSON"),
        ("[" * 900, None, "the line isn't JSON"),
        ("[]", None, "must be a JSON object"),
        ("x" * (MAX_BYTES + 1), None, f"longer than max_body_bytes={MAX_BYTES}"),
        (line(None), None, "custom_id must be"),
        (line(""), None, "custom_id must be"),
        (line("b", method="GET"), "b", 'method must be "POST"'),
        (line("b", url=3), "b", "url must be a string"),
        (line("b", body=[]), "b", "body must be a JSON object"),
        (line("a"), "a", "custom_id='a' is line 1's already"),
    ],
)
def test_bad_lines_are_told_by_number_and_harm_no_other(
    tmp_path: Path, bad: str, custom_id: str | None, message: str
) -> None:
    write(tmp_path / "input.jsonl", [line("a"), bad, line("c")])
    tally = run(tmp_path)
    (error,) = read(tmp_path / "errors.jsonl")
    assert (error["line"], error["custom_id"]) == (2, custom_id)
    assert message in error["error"]["message"]
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["message"] == error["error"]["message"]
    assert {each["custom_id"] for each in read(tmp_path / "output.jsonl")} == {"a", "c"}
    assert (tally.num_answered, tally.num_errors) == (2, 1)
    again = run(tmp_path)
    assert (again.num_before, again.num_answered, again.num_errors) == (3, 0, 0)
    assert len(read(tmp_path / "errors.jsonl")) == 1


def test_what_the_service_refuses_is_an_error(tmp_path: Path) -> None:
    async def refuse(url: str, body: bytes, request_id: str) -> dict[str, Any]:
        raise InvalidRequestError("prompt is too long")

    write(tmp_path / "input.jsonl", [line("a")])
    assert run(tmp_path, refuse).num_errors == 1
    (error,) = read(tmp_path / "errors.jsonl")
    assert error["error"]["message"] == "prompt is too long"
    assert error["response"]["request_id"]


def test_what_finds_no_room_is_left_for_a_rerun(tmp_path: Path) -> None:
    async def answer(url: str, body: bytes, request_id: str) -> dict[str, Any]:
        if json.loads(body)["prompt"] == "full":
            raise CapacityError("full", retry_after_s=1)
        return await echo(url, body, request_id)

    write(tmp_path / "input.jsonl", [line("a", body={"prompt": "full"}), line("b")])
    tally = run(tmp_path, answer)
    assert (tally.num_left, tally.num_answered, str(tally.reason)) == (1, 1, "full")
    assert not read(tmp_path / "errors.jsonl")
    assert run(tmp_path).num_answered == 1
    assert {each["custom_id"] for each in read(tmp_path / "output.jsonl")} == {"a", "b"}


def test_nothing_more_is_asked_of_an_engine_that_is_gone(tmp_path: Path) -> None:
    asked = []

    async def fail(url: str, body: bytes, request_id: str) -> dict[str, Any]:
        asked.append(body)
        raise UnavailableError("gone")

    write(tmp_path / "input.jsonl", [line(str(number)) for number in range(100)])
    tally = run(tmp_path, fail)
    assert isinstance(tally.reason, UnavailableError)
    assert len(asked) == tally.num_left <= 5
    assert not read(tmp_path / "errors.jsonl")


def test_only_so_many_run_at_once(tmp_path: Path) -> None:
    running = most = 0

    async def answer(url: str, body: bytes, request_id: str) -> dict[str, Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10):
            await asyncio.sleep(0)
        running -= 1
        return await echo(url, body, request_id)

    write(tmp_path / "input.jsonl", [line(str(number)) for number in range(30)])
    assert run(tmp_path, answer, max_concurrency=3).num_answered == 30
    assert most == 3


def test_what_the_operator_must_mend_ends_the_run_and_is_no_error_of_a_line(tmp_path: Path) -> None:
    async def answer(url: str, body: bytes, request_id: str) -> dict[str, Any]:
        if json.loads(body)["prompt"] == "bad":
            raise ConfigError("the chat template can't be read")
        return await echo(url, body, request_id)

    lines = [line("a"), line("b", body={"prompt": "bad"}), line("c")]
    write(tmp_path / "input.jsonl", lines)
    with pytest.raises(ConfigError, match="the chat template can't be read"):
        run(tmp_path, answer, max_concurrency=1)
    assert not read(tmp_path / "errors.jsonl")
    tally = run(tmp_path)
    assert (tally.num_before, tally.num_answered) == (1, 2)
