"""What every conversion keeps to, shown by one of Gemma 3."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("gguf", reason="the gguf extra isn't installed")

from tests.gguf_files import make_gemma_tensors, write_gemma
from workers.convert import convert
from workers.errors import ModelError

pytestmark = pytest.mark.cpu


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.get_tensor(name)


def convert_tiny(tmp_path: Path, **options: Any) -> Path:
    source = write_gemma(tmp_path / "tiny.gguf", make_gemma_tensors(), **options)
    convert(source, tmp_path / "out" / "tiny", dtype=torch.float32, on_message=print)
    return tmp_path / "out" / "tiny"


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        folder = convert_tiny(tmp_path)
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"split\.count=3 must be 1: .* llama-gguf-split --merge"):
        convert_tiny(tmp_path, more=lambda writer: writer.add_uint16("split.count", 3))
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(ModelError, match=r"becomes 0\.0 GB, and .*/out has 0\.0 GB free"):
        convert_tiny(tmp_path)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    source = write_gemma(tmp_path / "whole.gguf", make_gemma_tensors())
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(source.read_bytes()[: int(share * source.stat().st_size)])
    with pytest.raises(ModelError, match=r"cut\.gguf: (damaged or cut short|can't be read)"):
        convert(cut, tmp_path / "out", on_message=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("eos_token_id", 99, r"eos_token_id=99 must be in \[0, 12\)"),
        ("token_type", 1 << 63, "damaged"),
    ],
)
def test_a_damaged_number_is_refused(tmp_path: Path, key: str, value: int, reason: str) -> None:
    """A token id, and how many token types there are: both stand behind their key."""
    source = write_gemma(tmp_path / "tiny.gguf", make_gemma_tensors())
    content = source.read_bytes()
    place = content.index(f"tokenizer.ggml.{key}".encode()) + len(f"tokenizer.ggml.{key}")
    skipped, size = (4, 4) if key == "eos_token_id" else (8, 8)
    start = place + skipped
    changed = value.to_bytes(size, "little")
    source.write_bytes(content[:start] + changed + content[start + size :])

    with pytest.raises(ModelError, match=reason):
        convert(source, tmp_path / "out", dtype=torch.float32, on_message=print)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"PK\3\4 something else")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(file, tmp_path / "out", on_message=print)


@pytest.mark.full
def test_the_command_refuses_in_one_sentence(tmp_path: Path) -> None:
    source = tmp_path / "empty.gguf"
    source.touch()
    ended = subprocess.run(
        [sys.executable, "-m", "workers.convert", str(source), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {source}: can't be read: ")
    assert len(ended.stderr.splitlines()) == 1


def test_an_existing_target_is_left_alone(tmp_path: Path) -> None:
    folder = convert_tiny(tmp_path)
    before = read_tensor(folder, "model.norm.weight")
    with pytest.raises(ModelError, match="already exists"):
        convert_tiny(tmp_path)
    assert torch.equal(read_tensor(folder, "model.norm.weight"), before)


def test_of_two_conversions_at_once_the_first_stays(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(convert_tiny(tmp_path), other)
    source, target = tmp_path / "tiny.gguf", tmp_path / "out" / "second"

    def finish_first(message: str) -> None:
        if message == "tokenizer written":
            other.rename(target)

    convert(source, target, dtype=torch.bfloat16, on_message=finish_first)
    assert read_tensor(target, "model.norm.weight").dtype == torch.float32
    assert {path.name for path in target.parent.iterdir()} == {"tiny", "second"}


def run_main(
    source: Path, target: Path, *, first: str = "", **options: Any
) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, after the statements `first`."""
    script = (
        f"import os, signal, sys, workers.convert as c, workers.gguf.gemma3 as gemma3\n{first}\n"
        f"sys.argv[1:] = [{str(source)!r}, {str(target)!r}]\n"
        "c.main()\n"
    )
    return subprocess.run([sys.executable, "-c", script], text=True, check=False, **options)


@pytest.mark.full
def test_nobody_need_listen(tmp_path: Path) -> None:
    """Who asked for the conversion is gone: it is finished all the same."""
    source = write_gemma(tmp_path / "tiny.gguf", make_gemma_tensors())
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = run_main(source, tmp_path / "out", stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "out" / "config.json").is_file()


def test_the_last_message_comes_when_the_folder_is_there(tmp_path: Path) -> None:
    source, target = write_gemma(tmp_path / "tiny.gguf", make_gemma_tensors()), tmp_path / "out"

    def fail_at_last(message: str) -> None:
        if "tensors" in message:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        convert(source, target, on_message=fail_at_last)
    assert (target / "model.safetensors").is_file()


@pytest.mark.full
@pytest.mark.parametrize("limit", [20, 20_000])
def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path, limit: int) -> None:
    """A limit on the size of files stands for it; at first config.json passes it, then weights."""
    source = write_gemma(tmp_path / "tiny.gguf", make_gemma_tensors())
    first = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    ended = run_main(source, tmp_path / "out" / "tiny", first=first, capture_output=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "File too large" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert list((tmp_path / "out").iterdir()) == []


def set_key(kind: str, key: str, value: Any) -> Callable[[Any], None]:
    """Writes the metadata key, in place of what it was."""

    def write(writer: Any) -> None:
        for keys in writer.kv_data:
            keys.pop(key, None)
        getattr(writer, f"add_{kind}")(key, value)

    return write


@pytest.mark.parametrize(
    ("kind", "key", "value", "sentence"),
    [
        ("string", "split.count", "2", "split.count='2' must be a whole number"),
        ("array", "split.count", [1, 2], "split.count=[1, 2] must be a whole number"),
        ("uint32", "general.architecture", 3, "general.architecture=3 must be a text"),
        ("array", "general.architecture", [3], "general.architecture=[3] must be a text"),
        ("array", "general.alignment", [8, 8], "damaged or cut short: "),
        ("string", "gemma3.rope.freq_base", "x", "gemma3.rope.freq_base='x' must be a number"),
        ("float32", "gemma3.block_count", 1.0, "gemma3.block_count=1.0 must be a whole number of"),
        ("uint32", "gemma3.block_count", 10**9, "block_count=1000000000 must be 1, the number of"),
        ("string", "gemma3.attention.head_count", "1", "head_count='1' must be a number"),
        ("string", "gemma3.attention.sliding_window_pattern", "1", "pattern='1' must be a number"),
        ("uint32", "tokenizer.chat_template", 7, "tokenizer.chat_template=7 must be a text"),
        ("array", "tokenizer.ggml.tokens", [1] * 99, "tokens=[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,"),
        ("string", "tokenizer.ggml.eos_token_id", "1", "eos_token_id='1' must be a whole number"),
        (
            "array",
            "tokenizer.ggml.token_type",
            [1, 1],
            "token_type has 2 entries, and must have 12",
        ),
    ],
)
def test_metadata_of_a_wrong_kind_is_refused(
    kind: str, key: str, value: Any, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as raised:
        convert_tiny(tmp_path, more=set_key(kind, key, value))
    assert sentence in str(raised.value)
    assert len(str(raised.value)) < 300
    assert not (tmp_path / "out").exists()


def test_a_conversion_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    source = write_gemma(tmp_path / "tiny.gguf", make_gemma_tensors())
    target = tmp_path / "out" / "tiny"
    # Stops after its first message, which comes when half of the files are written.
    first = (
        "gemma3.write_weights = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or signal.pause()"
    )
    ended = run_main(source, target, first=first, capture_output=True)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert list(target.parent.iterdir()) == []
