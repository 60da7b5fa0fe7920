import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from runtime import driver, model_files
from runtime.config import EngineConfig
from runtime.errors import ConfigError
from runtime.model_files import HuggingFaceHub, fetch_weights, resolve_model

pytestmark = pytest.mark.unit


def make_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


class FakeHub:
    """Has one model; downloads make its files."""

    def __init__(self, folder: Path, files: Sequence[str] | None, *, told: bool = True) -> None:
        self.folder = folder
        self.files = files
        self.told = told
        self.revisions: list[str | None] = []

    def list_files(self, model: str) -> list[str] | None:
        return list(self.files or ()) if self.told else None

    def download(self, model: str, patterns: Sequence[str], revision: str | None) -> str:
        self.revisions.append(revision)
        if self.files is None:
            raise ConnectionError("no route to the hub\nmore")
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.files:
            if any(fnmatch(name, pattern) for pattern in patterns):
                (self.folder / name).write_text("{}")
        return str(self.folder)

    def names(self) -> set[str]:
        """What was downloaded."""
        return {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()


class NoHub:
    """None of its methods may be called."""

    def list_files(self, model: str) -> list[str] | None:
        raise AssertionError(f"asked the hub for {model}")

    def download(self, model: str, patterns: Sequence[str], revision: str | None) -> str:
        raise AssertionError(f"asked the hub for {model}")


def silent(message: str) -> None: ...


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    assert resolve_model(str(folder), silent, hub=NoHub()) == str(folder)


def test_a_relative_folder_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name", silent, hub=NoHub()) == str(folder)


@pytest.mark.parametrize("model", ["/nowhere/model", "./model", "~/no-such-model", "a/b/c"])
def test_a_path_that_does_not_exist_is_no_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match=f"model='{model}': there is no such folder"):
        resolve_model(model, silent, hub=NoHub())


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), silent, hub=NoHub())


def test_a_folder_with_a_gguf_file_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"layout: give the path of its file model\.Q4_K_M\.gguf"):
        resolve_model(str(tmp_path), silent, hub=NoHub())
    (tmp_path / "model.BF16.gguf").write_bytes(b"GGUF")
    which = r"layout: give the path of one of its files, such as model\.BF16\.gguf"
    with pytest.raises(ConfigError, match=which):
        resolve_model(str(tmp_path), silent, hub=NoHub())


@pytest.mark.parametrize("model", ["~no-such-user/model", "~no-such-user/model.gguf"])
def test_a_user_that_does_not_exist_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match="the home folder of ~no-such-user isn't known"):
        resolve_model(model, silent, hub=NoHub())


@pytest.mark.parametrize("model", ["a" * 5000, "/" + "a" * 5000, "a" * 5000 + ".gguf"])
def test_a_name_that_no_file_can_have_is_refused(model: str) -> None:
    sentence = r"aaa\.\.\.' can't be looked up: File name too long"
    with pytest.raises(ConfigError, match=sentence) as raised:
        resolve_model(model, silent, hub=NoHub())
    assert len(str(raised.value)) < 200


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file: it must be a GGUF file, or a folder"):
        resolve_model(str(file), silent, hub=NoHub())


@pytest.mark.parametrize("name", ["model.gguf", "org/model.GGUF"])
def test_a_gguf_file_is_converted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def gguf_folder(model: str, on_message: object) -> Path:
        asked.append(model)
        return tmp_path / "converted"

    monkeypatch.setattr(model_files, "gguf_folder", gguf_folder)
    folder = resolve_model(name, silent, hub=NoHub())
    assert (folder, asked) == (str(tmp_path / "converted"), [name])


def test_a_folder_may_be_named_like_a_file(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model.gguf")
    assert resolve_model(str(folder), silent, hub=NoHub()) == str(folder)


SMALL = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
WHOLE = SMALL | {"model-1.safetensors", "model-2.safetensors"}
OTHERS = {"README.md", "pytorch_model.bin", "tf_model.h5"}


@pytest.mark.parametrize("model", ["org/name", "name"])
def test_a_hub_model_s_weights_come_last(model: str, tmp_path: Path) -> None:
    hub = FakeHub(tmp_path / "5e1f", sorted(WHOLE | OTHERS))
    folder = resolve_model(model, silent, hub=hub)
    assert folder == str(tmp_path / "5e1f")
    assert hub.names() == SMALL
    fetch_weights(model, folder, silent, hub=hub)
    assert hub.names() == WHOLE
    assert hub.revisions == [None, "5e1f"]  # whatever was published between


def test_no_weights_are_fetched_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "org" / "name")
    fetch_weights(str(folder), str(folder), silent, hub=NoHub())
    fetch_weights("demo", str(folder), silent, hub=NoHub())
    monkeypatch.chdir(tmp_path)
    fetch_weights("org/name", str(folder), silent, hub=NoHub())


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            ["config.json", "optimizer.pt", "pytorch_model.bin"],
            r"the repository has no \*\.safetensors file, only pytorch_model\.bin and the like, "
            r".*from_pretrained\('org/name'\).* and give the path of FOLDER$",
        ),
        (["config.json", "model.onnx"], r"the repository has no \*\.safetensors file$"),
        # Where the loader doesn't look.
        (["config.json", "onnx/model.safetensors"], r"the repository has no \*\.safetensors file$"),
        (["name.Q4_0.gguf"], r"no config\.json, .* layout: download one of its GGUF files"),
        (["adapter.safetensors"], r"the repository has no config\.json, .* layout$"),
    ],
)
def test_a_repository_of_another_kind_is_refused_before_it_is_downloaded(
    files: list[str], sentence: str, tmp_path: Path
) -> None:
    hub = FakeHub(tmp_path / "5e1f", files)
    with pytest.raises(ConfigError, match=f"model='org/name': .*{sentence}"):
        resolve_model("org/name", silent, hub=hub)
    assert hub.revisions == []


def test_a_model_in_the_cache_needs_no_listing(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path / "5e1f", sorted(WHOLE), told=False)
    fetch_weights("org/name", resolve_model("org/name", silent, hub=hub), silent, hub=hub)
    assert hub.names() == WHOLE


def test_a_cache_without_weights_is_refused(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path / "5e1f", sorted(SMALL), told=False)
    folder = resolve_model("org/name", silent, hub=hub)
    with pytest.raises(ConfigError, match=r"model='org/name': no \*\.safetensors file came from"):
        fetch_weights("org/name", folder, silent, hub=hub)


def test_a_snapshot_without_config_is_refused(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path / "5e1f", ["tokenizer.json"], told=False)
    with pytest.raises(ConfigError, match=r"model='org/name': .* has no config\.json"):
        resolve_model("org/name", silent, hub=hub)


def test_a_hub_that_fails_is_named(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, None, told=False)
    with pytest.raises(
        ConfigError, match=r"no such folder, and the Hugging Face hub says: no route"
    ):
        resolve_model("org/name", silent, hub=hub)
    with pytest.raises(
        ConfigError, match=r"'org/name': the Hugging Face hub says: no route to the"
    ):
        fetch_weights("org/name", str(tmp_path), silent, hub=hub)


def test_a_model_that_is_refused_costs_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order in which an engine is started."""
    hub = FakeHub(tmp_path / "5e1f", sorted(WHOLE))
    monkeypatch.setattr(HuggingFaceHub, "list_files", lambda _, *told: hub.list_files(*told))
    monkeypatch.setattr(HuggingFaceHub, "download", lambda _, *told: hub.download(*told))

    def refuse(model: str, folder: Path, **options: object) -> None:
        raise ConfigError(f"model={model!r} isn't served")

    monkeypatch.setattr(driver, "check_model", refuse)
    starting = driver.running_engine(EngineConfig(model="org/name"), quiet=True)
    with pytest.raises(ConfigError, match="isn't served"), starting:
        pass
    assert hub.names() == SMALL


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
