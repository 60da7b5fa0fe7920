import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One of the test's own, with a path that is short enough for Ray."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        yield Path(folder)


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """A test leaves no child process; those of another that failed aren't its own."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
