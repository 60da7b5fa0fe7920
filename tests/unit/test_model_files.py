import subprocess
import sys
from pathlib import Path

import pytest

from runtime import model_files
from runtime.errors import ConfigError
from runtime.model_files import resolve_model

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


def test_a_folder_with_a_gguf_file_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"layout: give the path of its file model\.Q4_K_M\.gguf"):
        resolve_model(str(tmp_path), silent, download=unreachable_hub)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file: it must be a GGUF file, or a folder"):
        resolve_model(str(file), silent, download=unreachable_hub)


@pytest.mark.parametrize("name", ["model.gguf", "org/model.GGUF"])
def test_a_gguf_file_is_converted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def gguf_folder(model: str, on_message: object) -> Path:
        asked.append(model)
        return tmp_path / "converted"

    monkeypatch.setattr(model_files, "gguf_folder", gguf_folder)
    folder = resolve_model(name, silent, download=unreachable_hub)
    assert (folder, asked) == (str(tmp_path / "converted"), [name])


def test_a_folder_may_be_named_like_a_file(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model.gguf")
    assert resolve_model(str(folder), silent, download=unreachable_hub) == str(folder)


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
