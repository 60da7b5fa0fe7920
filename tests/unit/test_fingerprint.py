import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime import fingerprint
from runtime.errors import ConfigError
from runtime.fingerprint import model_fingerprint
from runtime.sampling_params import LOCKSTEP_DEFAULTS

pytestmark = pytest.mark.unit

TENSORS = {
    "head": np.arange(100_000, dtype=np.float32),
    "norm": np.arange(8, dtype=np.float32),
}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder, {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}})
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def of(folder: Path, dtype: str = "auto", **changes: Any) -> str:
    fields = {"eos_token_ids": (1, 2), "defaults": LOCKSTEP_DEFAULTS} | changes
    return model_fingerprint(folder, dtype, **fields)


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / "README.md").write_text("weights of mine")
    assert of(copy) == of(folder)
    assert len(of(folder)) == 32
    assert of(folder, eos_token_ids=(2, 1)) == of(folder)


def change_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def change_config(folder: Path) -> None:
    write_config(folder, {"dtype": "bfloat16", "rope_theta": 10_000})


def tune_a_small_tensor(folder: Path) -> None:
    save_file(TENSORS | {"norm": TENSORS["norm"] + 1}, folder / "model.safetensors")


def tune_a_large_tensor(folder: Path) -> None:
    save_file(TENSORS | {"head": TENSORS["head"] * 1.01}, folder / "model.safetensors")


def change_the_last_row(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rename_a_tensor(folder: Path) -> None:
    save_file({"tail": TENSORS["head"], "norm": TENSORS["norm"]}, folder / "model.safetensors")


def add_a_file(folder: Path) -> None:
    save_file({"more": TENSORS["norm"]}, folder / "model-2.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        change_tokenizer,
        remove_tokenizer,
        change_config,
        tune_a_small_tensor,
        tune_a_large_tensor,
        change_the_last_row,
        rename_a_tensor,
        add_a_file,
    ],
)
def test_what_changes_tokens_changes_it(folder: Path, change: Callable[[Path], None]) -> None:
    before = of(folder)
    change(folder)
    assert of(folder) != before


def test_how_it_is_served_changes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(folder)
    assert of(folder, "float16") != before
    assert of(folder, eos_token_ids=(1,)) != before
    assert of(folder, defaults=replace(LOCKSTEP_DEFAULTS, temperature=0.5)) != before
    monkeypatch.setattr(fingerprint, "SAMPLING_VERSION", 0)
    assert of(folder) != before


def test_auto_is_what_the_configuration_says(folder: Path) -> None:
    assert of(folder, "bfloat16") == of(folder, "auto")
    write_config(folder, {"dtype": "bfloat16", "text_config": {"dtype": "float16"}})
    assert of(folder, "auto") not in {of(folder, "bfloat16"), of(folder, "float16")}


def test_the_copy_that_mistral_adds_does_not_count(folder: Path) -> None:
    before = of(folder)
    save_file({"more": TENSORS["norm"]}, folder / "consolidated.safetensors")
    assert of(folder) == before


def test_a_damaged_file_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not safetensors!")
    with pytest.raises(ConfigError, match=f"no fingerprint can be made of the model in {folder}"):
        of(folder)


def test_missing_weights_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "model.safetensors").unlink()
    of(folder)
    assert "has no safetensors on this host" in caplog.text
