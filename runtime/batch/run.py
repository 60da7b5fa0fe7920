"""Answers a file's lines, some at once, each as soon as it is done."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime.batch.ledger import Ledger
from runtime.batch.lines import RawLine, check, custom_id_of, parse, read_lines
from runtime.batch.results import ResultFile, result_id
from runtime.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    LockstepError,
    UnavailableError,
)
from runtime.frontend.openai.errors import body_of, kind_of

# Of an endpoint, a body and a request id. Raises a LockstepError.
Answer = Callable[[str, bytes, str], Awaitable[dict[str, Any]]]
# The request may be answered another time.
PASSING = (UnavailableError, CapacityError, DeadlineError)


class Progress(Protocol):
    """Who is told of each line that needs no more work."""

    def line(self, num_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What a run needs beside its files."""

    model: str  # of bodies that name none
    max_body_bytes: int
    max_concurrency: int


@dataclass(slots=True)
class Tally:
    """How a run went."""

    num_before: int = 0  # finished by an earlier run
    num_answered: int = 0
    num_errors: int = 0
    num_left: int = 0  # that failed for now
    reason: LockstepError | None = None  # for which the last of them failed


class BatchRun:
    """One pass over the input. Lines that `ledger` knows as finished are left out."""

    def __init__(
        self,
        answer: Answer,
        options: BatchOptions,
        *,
        ledger: Ledger,
        output: ResultFile,
        errors: ResultFile,
        progress: Progress,
    ) -> None:
        self.tally = Tally()
        self._answer = answer
        self._options = options
        self._ledger = ledger
        self._output = output
        self._errors = errors
        self._progress = progress
        self._window = asyncio.Semaphore(options.max_concurrency)

    async def run(self, path: Path) -> Tally:
        """Ends early where the engine is gone: the tally has the reason.

        Raises ConfigError: files can't be used, the results are another input's, or requests can't
        be answered as the operator has set things up; what is done is in the files.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for line in read_lines(path, self._options.max_body_bytes):
                    # Answers that have come go first, also while lines are only left out.
                    await asyncio.sleep(0)
                    if isinstance(self.tally.reason, UnavailableError):
                        break
                    await self._take(line, tasks)
        except* LockstepError as group:
            raise _first_of(group) from None
        return self.tally

    async def _take(self, line: RawLine, tasks: asyncio.TaskGroup) -> None:
        custom_id = None
        try:
            fields = parse(line, self._options.max_body_bytes)
            custom_id = custom_id_of(fields)
            first = self._ledger.first_line_of(custom_id, line.number)
            if first != line.number:
                raise InvalidRequestError(
                    f"custom_id={custom_id!r} is line {first}'s already: each needs its own"
                )
            request = check(custom_id, fields)
        except InvalidRequestError as error:
            if not self._is_done(line, custom_id):
                self._refuse(line, custom_id, error)
            return
        if self._is_done(line, custom_id):
            return
        body = json.dumps({"model": self._options.model, **request.body}).encode()
        await self._window.acquire()
        task = tasks.create_task(self._run_one(line, custom_id, request.url, body))
        task.add_done_callback(lambda _: self._window.release())

    def _is_done(self, line: RawLine, custom_id: str | None) -> bool:
        if not self._ledger.is_finished(line, custom_id):
            return False
        self.tally.num_before += 1
        self._progress.line(0)
        return True

    async def _run_one(self, line: RawLine, custom_id: str, url: str, body: bytes) -> None:
        request_id = uuid.uuid4().hex
        try:
            answer = await self._answer(url, body, request_id)
            self._output.write(
                {
                    "id": result_id(line),
                    "custom_id": custom_id,
                    "response": {"status_code": 200, "request_id": request_id, "body": answer},
                    "error": None,
                }
            )
        except PASSING as error:
            self.tally.num_left += 1
            self.tally.reason = error
            return
        except ConfigError:
            # No fault of the line: it is to be answered once the operator has mended it.
            raise
        except LockstepError as error:
            self._refuse(line, custom_id, error, request_id)
            return
        self.tally.num_answered += 1
        self._progress.line(answer["usage"]["completion_tokens"])

    def _refuse(
        self,
        line: RawLine,
        custom_id: str | None,
        error: LockstepError,
        request_id: str | None = None,
    ) -> None:
        kind = kind_of(error)
        body = body_of(error, ())
        self._errors.write(
            {
                "id": result_id(line),
                "line": line.number,
                "custom_id": custom_id,
                "response": {"status_code": kind.status, "request_id": request_id, "body": body},
                "error": {"code": body["error"]["code"] or kind.type, "message": str(error)},
            }
        )
        self.tally.num_errors += 1
        self._progress.line(0)


def _first_of(group: BaseExceptionGroup[LockstepError]) -> LockstepError:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
