"""Batch files, and runs over a service that says what the test wants."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.batch.ledger import Ledger
from runtime.batch.lines import read_lines
from runtime.batch.results import ResultFile
from runtime.batch.run import Answer, BatchOptions, BatchRun, Tally

MAX_BYTES = 1000
URL = "/v1/completions"


def line(custom_id: object, **changes: Any) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": "hi"}}
    return json.dumps(fields | changes)


def number_of(result: Any) -> int:
    """The line of the input that a result is of."""
    return int(result["id"].split("_")[2])


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def read(path: Path) -> list[Any]:
    return [json.loads(each) for each in path.read_text().splitlines()]


async def echo(url: str, body: bytes, request_id: str) -> dict[str, Any]:
    return {"url": url, "body": json.loads(body), "usage": {"completion_tokens": 2}}


class CountedProgress:
    def __init__(self) -> None:
        self.lines: list[int] = []

    def line(self, num_tokens: int) -> None:
        self.lines.append(num_tokens)


def run(folder: Path, answer: Answer = echo, *, max_concurrency: int = 4) -> Tally:
    """Over input.jsonl, output.jsonl and errors.jsonl of a folder."""
    options = BatchOptions(model="tiny", max_body_bytes=MAX_BYTES, max_concurrency=max_concurrency)

    async def work() -> Tally:
        batch = BatchRun(
            answer,
            options,
            ledger=ledger,
            output=output,
            errors=errors,
            progress=CountedProgress(),
        )
        return await batch.run(folder / "input.jsonl")

    with (
        Ledger() as ledger,
        ResultFile(folder / "output.jsonl", option="output") as output,
        ResultFile(folder / "errors.jsonl", option="errors") as errors,
    ):
        output.recover(ledger)
        errors.recover(ledger)
        ledger.match(read_lines(folder / "input.jsonl", MAX_BYTES))
        return asyncio.run(work())
