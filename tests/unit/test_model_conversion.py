import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import helper_process, model_conversion
from runtime.errors import ConfigError
from runtime.model_conversion import DEMO_FOLDER, cache_root, demo_folder, gguf_folder

pytestmark = pytest.mark.unit


def silent(message: str) -> None: ...


def any_version(name: str) -> str:
    """Stands for `importlib.metadata.version`: all is there, and new enough."""
    return "99.0"


def test_the_cache_honours_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "lockstep"
    folder = tmp_path / "lockstep" / DEMO_FOLDER
    folder.mkdir(parents=True)
    assert demo_folder(silent) == folder


@pytest.mark.parametrize("value", [None, "", "relative/path"])
def test_the_cache_is_below_home_otherwise(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_root() == tmp_path / ".cache" / "lockstep"


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lockstep").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_conversion, "version", any_version)
    with pytest.raises(ConfigError, match=f"can't be written to {tmp_path}/lockstep"):
        demo_folder(silent)


class Conversion:
    """Stands for the packages and the converter: makes the folder, or is told to fail."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.cache = root / "lockstep"
        self.folder = self.cache / DEMO_FOLDER
        self.messages: list[str] = []
        self.sources: list[str] = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        monkeypatch.setattr(model_conversion, "version", any_version)
        monkeypatch.setattr(model_conversion.importlib, "import_module", lambda name: self)
        real = subprocess.Popen

        def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
            assert command[:4] == [sys.executable, "-P", "-m", "workers.convert"]
            self.sources.append(command[4])
            self.process = real([sys.executable, "-c", script, *command[4:]], **options)
            return self.process

        monkeypatch.setattr(helper_process.subprocess, "Popen", start)

    def assemble(self, path: Path) -> Path:
        path.write_bytes(b"GGUF")
        return path

    def left(self) -> set[str]:
        """Names in the cache, beside locks."""
        return {path.name for path in self.cache.iterdir() if path.suffix != ".lock"}


GOOD = "import pathlib, sys; print('done: half way'); pathlib.Path(sys.argv[2]).mkdir()"


def test_demo_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = Conversion(tmp_path, monkeypatch, GOOD)
    assert demo_folder(conversion.messages.append) == conversion.folder
    assert "Gemma Terms of Use" in conversion.messages[0]
    assert conversion.messages[1:] == ["half way"]
    assert demo_folder(conversion.messages.append) == conversion.folder
    assert len(conversion.messages) == 2
    assert conversion.left() == {DEMO_FOLDER}


def test_leftovers_of_a_killed_conversion_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion(tmp_path, monkeypatch, GOOD)
    leftover = conversion.cache / f".{DEMO_FOLDER}.abc"
    leftover.mkdir(parents=True)
    demo_folder(conversion.messages.append)
    assert conversion.left() == {DEMO_FOLDER}


def test_a_failed_conversion_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion(tmp_path, monkeypatch, "import sys; sys.exit('error: disk is full')")
    with pytest.raises(ConfigError, match="model='demo' can't be converted: disk is full"):
        demo_folder(conversion.messages.append)
    assert not conversion.folder.exists()
    assert conversion.left() == set()


def test_an_interrupted_conversion_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import signal; print('done: started', flush=True); signal.pause()"
    conversion = Conversion(tmp_path, monkeypatch, script)

    def interrupt(message: str) -> None:
        if message == "started":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_folder(interrupt)
    assert conversion.process.returncode is not None
    assert conversion.left() == set()


def test_a_second_start_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion(tmp_path, monkeypatch, "raise SystemExit('must not run')")
    conversion.cache.mkdir()
    first = (conversion.cache / f"{DEMO_FOLDER}.lock").open("w")
    fcntl.flock(first, fcntl.LOCK_EX)

    def finish_first(message: str) -> None:
        assert message.startswith("Waiting for another process")
        conversion.folder.mkdir()
        first.close()

    assert demo_folder(finish_first) == conversion.folder


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "where memory runs out"),
        ("print('a'); raise KeyError('b')", r"ended with code 1 and: a\n(.*\n)*KeyError: 'b'"),
        ("raise SystemExit(3)", "ended with code 3 and: nothing"),
    ],
)
def test_how_a_conversion_ended_is_told(
    script: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion(tmp_path, monkeypatch, script)
    with pytest.raises(ConfigError, match=sentence):
        demo_folder(conversion.messages.append)
    assert conversion.left() == set()
    assert len(conversion.messages) == 1  # none of what broke


def make_file(folder: Path, name: str = "My model (1).Q4_K_M.gguf") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_bytes(b"GGUF")
    return file


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = Conversion(tmp_path, monkeypatch, GOOD)
    file = make_file(tmp_path / "models")
    folder = gguf_folder(str(file), conversion.messages.append)
    assert folder.is_dir()
    assert folder.parent == conversion.cache
    # Readable, and free of what a shell or a glob would take for something else.
    assert folder.name.startswith("My_model__1_.Q4_K_M-")
    assert folder.name.endswith("-bfloat16-1")
    assert conversion.messages[0].startswith("Converting My model (1).Q4_K_M.gguf, 0.0 GB, once,")
    assert conversion.messages[1:] == ["half way"]
    monkeypatch.chdir(file.parent)
    assert gguf_folder(file.name, silent) == folder
    assert conversion.sources == [str(file)]


@pytest.mark.parametrize("change", ["size", "time", "path"])
def test_another_gguf_file_is_another_folder(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Conversion(tmp_path, monkeypatch, GOOD)
    file = make_file(tmp_path / "models")
    first = gguf_folder(str(file), silent)
    facts = file.stat()
    match change:
        case "size":
            file.write_bytes(b"GGUF2")
            os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        case "time":
            os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
        case "path":
            file = Path(shutil.copy2(file, make_file(tmp_path / "others")))
    assert gguf_folder(str(file), silent) != first


def test_a_link_to_a_gguf_file_is_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the hub's cache, where the file itself is named by its hash."""
    conversion = Conversion(tmp_path, monkeypatch, GOOD)
    link = tmp_path / "model.gguf"
    link.symlink_to(make_file(tmp_path / "blobs", "0123abcd"))
    folder = gguf_folder(str(link), silent)
    assert folder.name.startswith("model-")
    # The converter is given the name that ends in .gguf.
    assert conversion.sources == [str(link)]
    link.unlink()
    link.symlink_to(make_file(tmp_path / "blobs", "4567cdef"))
    assert gguf_folder(str(link), silent) != folder


def test_a_gguf_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model='org/model\.gguf': there is no such file"):
        gguf_folder("org/model.gguf", silent)


def test_a_part_of_a_gguf_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = Conversion(tmp_path, monkeypatch, GOOD)
    part = make_file(tmp_path / "models", "model-00002-of-00003.gguf")
    with pytest.raises(ConfigError, match=r"is one of several files .* llama-gguf-split --merge"):
        gguf_folder(str(part), silent)
    assert conversion.sources == []


def test_a_gguf_file_that_cannot_be_converted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; sys.exit(f'error: {sys.argv[1]}: no tensors')"
    conversion = Conversion(tmp_path, monkeypatch, script)
    file = make_file(tmp_path / "models", "empty.gguf")
    with pytest.raises(ConfigError, match=rf"model='{file}' can't be converted: no tensors"):
        gguf_folder(str(file), conversion.messages.append)
    assert len(conversion.messages) == 1
    assert conversion.left() == set()
