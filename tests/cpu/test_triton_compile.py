"""Triton's compiler takes the kernels, and they fit: its interpreter allows more than it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        "sm_90 bfloat16 16 16 1",
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in (
                "sm_80 bfloat16 128 128 4",
                "sm_90 bfloat16 128 128 128",
                "sm_90 bfloat16 192 128 1",
                "sm_90 float16 80 96 3",
                "sm_80 bfloat16 512 512 8",
                "sm_90 bfloat16 256 256 64",
                "sm_80 float32 64 64 3",
                "sm_90 float32 512 512 2",
            )
        ),
    ],
)
def test_kernels_compile(case: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.triton_compile", *case.split()]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("shared memory") == 2 * 5
