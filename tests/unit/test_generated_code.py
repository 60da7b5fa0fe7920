from pathlib import Path

import pytest

from protos import generate

pytestmark = pytest.mark.unit


def make_tree(root: Path, files: dict[str, str]) -> Path:
    (root / "protos").mkdir(parents=True)
    for name, text in files.items():
        (root / "protos" / name).write_text(text)
    return root


def test_stale_missing_and_left_over_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = {"a_pb2.py": "old", "b_pb2.pyi": "same", "gone_pb2_grpc.py": "", "auth.py": "ours"}
    monkeypatch.setattr(generate, "ROOT", make_tree(tmp_path / "committed", committed))
    fresh = make_tree(tmp_path / "fresh", {"a_pb2.py": "new", "b_pb2.pyi": "same", "c_pb2.py": ""})
    assert generate.stale_files(fresh) == [
        "protos/a_pb2.py",
        "protos/c_pb2.py",
        "protos/gone_pb2_grpc.py",
    ]
