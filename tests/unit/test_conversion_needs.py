"""What must be there before a model is converted: packages, their versions, a place for it."""

import pwd
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from runtime import model_conversion
from runtime.errors import ConfigError
from runtime.model_conversion import (
    DEMO_NEEDS,
    GGUF_NEEDS,
    cache_root,
    demo_folder,
    gguf_folder,
)

pytestmark = pytest.mark.unit

NEWEST = {"accelerate": "1.10.0", "gguf": "0.17.0", "transformers": "5.24.0"}


def silent(message: str) -> None: ...


def installed(**versions: str) -> Callable[[str], str]:
    """Stands for `importlib.metadata.version` where nothing else is installed."""

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    return version


@pytest.fixture(autouse=True)
def no_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is missing must be told before a process is started."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a conversion was started")

    monkeypatch.setattr(model_conversion, "run_helper", start)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_file(folder: Path) -> Path:
    file = folder / "model.gguf"
    file.write_bytes(b"GGUF")
    return file


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(
        pwd, "getpwuid", lambda uid: {}[uid]
    )  # KeyError, as where there is no entry
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME or HOME"):
        cache_root()


def test_demo_without_its_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_conversion, "version", installed(gguf="0.17.0"))
    with pytest.raises(ConfigError, match=r'pip install "lockstep-serving\[demo\]"'):
        demo_folder(silent)


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_gguf_file_without_the_extra_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {name: version for name, version in NEWEST.items() if name != missing}
    monkeypatch.setattr(model_conversion, "version", installed(**there))
    with pytest.raises(
        ConfigError, match=rf'package {missing}, .*pip install "lockstep-serving\[gguf\]"'
    ):
        gguf_folder(str(make_file(tmp_path)), silent)


@pytest.mark.parametrize(
    ("name", "version", "least"),
    [
        ("transformers", "5.17.3", "5.24"),
        ("transformers", "4.99.0", "5.24"),
        ("accelerate", "1.9.0", "1.10"),
        ("gguf", "0.9.1", "0.17"),
    ],
)
def test_an_extra_that_is_too_old_is_named_with_both_versions(
    name: str, version: str, least: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_conversion, "version", installed(**NEWEST | {name: version}))
    sentence = f"needs the package {name} {least} or newer, and {version} is installed: pip install"
    with pytest.raises(ConfigError, match=sentence):
        gguf_folder(str(make_file(tmp_path)), silent)


def test_the_versions_are_those_of_the_extras() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    gguf = {f"{name}>={least}" for name, least in GGUF_NEEDS.items()}
    assert set(extras["gguf"]) == gguf
    assert {f"{name}>={least}" for name, least in DEMO_NEEDS.items() if least} <= set(
        extras["demo"]
    )
