"""What the scripts that run an engine share: lines of JSON on stdin, an answer to each on stdout.

The first line out says that the engine has answered a request: {"engine": "name version",
"memory_root": pid}. Then each line in, {"requests": [{"prompt": [id], "output_len": n}]}, is
answered by {"wall_s": s, "counts": [n]}. The script ends when stdin does. It runs in interpreters
that have nothing of ours, hence the standard library alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

Requests = list[dict[str, Any]]
# Ids that every vocabulary has; two tokens, so that a decode step was run too.
PROBE: Requests = [{"prompt": list(range(3, 19)), "output_len": 2}]


def take_stdout() -> TextIO:
    """A file of the process's output, for answers alone: what libraries print goes to stderr.

    To be called before the engine is imported.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def answer(
    answers: TextIO,
    engine: str,
    run: Callable[[Requests], list[int]],
    *,
    before: Callable[[], object] = lambda: None,
    memory_root: int | None = None,
) -> None:
    """Serves lines until there are no more. `run` returns how many tokens each request got.

    `before` is called ahead of each run, untimed. `memory_root` is the process whose tree is the
    engine, where it isn't this one.
    """
    check_counts(PROBE, run(PROBE))
    _write(answers, {"engine": engine, "memory_root": memory_root or os.getpid()})
    for requests in _lines():
        before()
        start_s = time.perf_counter()
        counts = run(requests)
        wall_s = time.perf_counter() - start_s
        _write(answers, {"wall_s": wall_s, "counts": counts})


def check_counts(requests: Requests, counts: list[int]) -> None:
    """Raises RuntimeError: a request got other than the tokens that were asked for."""
    wanted = [each["output_len"] for each in requests]
    if counts != wanted:
        raise RuntimeError(f"{counts} tokens came, of {wanted}")


def _lines() -> Iterator[Requests]:
    for line in sys.stdin:
        yield json.loads(line)["requests"]


def _write(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
