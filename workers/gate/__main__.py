"""Judges one model folder: `python -m workers.gate FOLDER --tp 2` prints a line of JSON."""

import argparse
import dataclasses
import json
import os
import resource
import sys
import traceback
from pathlib import Path

import transformers

from workers.caller import end_with_caller
from workers.errors import ModelError
from workers.gate.verdict import Verdict, judge
from workers.models.config import read_config

MEMORY_BYTES = 16 << 30  # a small copy takes far less


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workers.gate", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with a config.json")
    parser.add_argument("--tp", type=int, default=1, help="ranks that are wanted")
    arguments = parser.parse_args()
    end_with_caller()
    # Standard output is for the verdict; what libraries print goes to standard error.
    verdict_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _limit_memory()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    verdict = _judge(arguments.folder, arguments.tp)
    print(json.dumps(dataclasses.asdict(verdict)), file=verdict_out, flush=True)
    # Threads of libraries may still run; nothing of this process is needed any more.
    os._exit(0)


def _limit_memory() -> None:
    """To MEMORY_BYTES, or to less where that is the limit already."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _judge(folder: Path, tp: int) -> Verdict:
    try:
        return judge(read_config(folder), tp)
    except ModelError as error:
        reason = str(error)  # names this folder: not to be kept for others
    except Exception as error:  # the edge of the process: whatever a model's code raises
        traceback.print_exc(file=sys.stderr)
        reason = f"its test failed unexpectedly: {type(error).__name__}: {error}"
    return Verdict(architecture="", tp=tp, accepted=False, reason=reason, is_certain=False)


if __name__ == "__main__":
    main()
