"""Compiles our C files with the machine's compiler, once for each source and machine."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
# What isn't written down for the compiler is never assumed: infinities and NaN mean something.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-shared",
    "-fPIC",
    "-D_DEFAULT_SOURCE",  # madvise
    "-Wno-psabi",  # of vectors wider than the processor's, which no other file passes around
)
TIMEOUT_S = 120.0


class NoCompilerError(Exception):
    """There is no compiler, or it refuses the source; says why in half a sentence."""


def load(name: str, definitions: Sequence[str] = (), *, is_for_others: bool = False) -> ctypes.CDLL:
    """The library of `name`.c, with macros defined. Calls into it free the interpreter.

    With `is_for_others` what is loaded later may call it, too. Raises NoCompilerError.
    """
    command = shlex.split(os.environ.get("CC", "cc"))
    compiler = shutil.which(command[0]) if command else None
    if compiler is None:
        raise NoCompilerError("there is no C compiler: install gcc, or name one by CC")
    source = FOLDER / f"{name}.c"
    flags = [*command[1:], *FLAGS, *(f"-D{definition}" for definition in definitions)]
    target = _cache_folder() / f"{name}-{_key(source, compiler, flags)}.so"
    try:
        if not target.exists():
            _compile([compiler, *flags], source, target)
        return ctypes.CDLL(str(target), os.RTLD_GLOBAL if is_for_others else os.RTLD_LOCAL)
    except OSError as error:
        raise NoCompilerError(
            f"{target} can't be made or used ({error}): remove it, or name a folder that can be "
            "written to by XDG_CACHE_HOME"
        ) from error


def _compile(command: Sequence[str], source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        try:
            done = subprocess.run(
                [*command, str(source), "-o", str(made), "-lm"],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompilerError(f"{command[0]} can't compile {source.name}: {error}") from error
        if done.returncode:
            raise NoCompilerError(
                f"{command[0]} can't compile {source.name}: {done.stderr.strip()[:500]}"
            )
        # Another rank may do the same: whoever is last puts the same file in place.
        made.replace(target)
    logger.info("compiled %s", target)


def _key(source: Path, compiler: str, flags: Sequence[str]) -> str:
    """Of all that the result depends on: folders of caches are shared between machines."""
    stat = os.stat(compiler)
    headers = [each.read_text() for each in sorted(FOLDER.glob("*.h"))]
    parts = [
        source.read_text(),
        *headers,
        compiler,
        str(stat.st_mtime_ns),
        str(stat.st_size),
        *flags,
    ]
    parts += [platform.machine(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What of the processor `-march=native` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise NoCompilerError("this user has no home to keep what is compiled: set XDG_CACHE_HOME")
    return Path(cache) / "lockstep" / "native"
