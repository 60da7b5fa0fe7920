"""Makes the committed Python code from the .proto files: `python -m protos.generate [--check]`."""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "protos"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(target: Path) -> None:
    """Writes the code for all .proto files to `target`/protos. Exits where one can't be compiled.

    Names and imports come out right only when the files are named from the repository's root.
    """
    # Imported here: it comes with the dev extra, and `--help` should work without.
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).glob("*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *sources,
        ]
    )
    if code != 0:
        sys.exit(code)


def stale_files(fresh: Path) -> list[str]:
    """Names of committed files that differ from the fresh ones, are missing, or are left over."""
    old, new = _generated(ROOT), _generated(fresh)
    return sorted(name for name in old | new if old.get(name) != new.get(name))


def _generated(root: Path) -> dict[str, bytes]:
    return {
        f"{PACKAGE}/{path.name}": path.read_bytes()
        for path in (root / PACKAGE).iterdir()
        if path.name.endswith(SUFFIXES)
    }


def main() -> None:
    """The command. Exits with 1 where `--check` finds stale files."""
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, name stale files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        stale = stale_files(Path(scratch))
        if arguments.check and stale:
            sys.exit(f"stale: {', '.join(stale)}\nrun `make proto`")
        if not arguments.check:
            for name in stale:
                _replace(ROOT / name, Path(scratch) / name)
                print(f"wrote {name}")


def _replace(old: Path, new: Path) -> None:
    """A file whose .proto is gone goes too."""
    if new.exists():
        old.write_bytes(new.read_bytes())
    else:
        old.unlink()


if __name__ == "__main__":
    main()
