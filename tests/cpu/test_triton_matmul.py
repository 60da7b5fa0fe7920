"""The matmul kernel under triton's interpreter, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton isn't installed")
pytestmark = pytest.mark.cpu

SHAPES = [(1, 64, 96), (3, 33, 7), (70, 100, 130), (64, 32, 64), (0, 16, 16)]
# Rows keep their places in a tile: the interpreter multiplies tiles by numpy, where places matter.
# In a process of its own: triton reads the variable when a kernel is made.
SCRIPT = """
import json, sys, torch
from workers.layers.triton_matmul import triton_linear, triton_scaled_linear

errors, alike = [], []
generator = torch.Generator().manual_seed(3)
for dtype in (torch.float32, torch.float16):
    for rows, inputs, outputs in json.loads(sys.argv[1]):
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        w = torch.randn(outputs, inputs, generator=generator).to(dtype)
        b = torch.randn(outputs, generator=generator).to(dtype)
        for bias in (None, b):
            y = triton_linear(x[None], w, bias)
            assert y.shape == (1, rows, outputs) and y.dtype == dtype
            wanted = x.double() @ w.double().T + (0 if bias is None else bias.double())
            error = (y[0].double() - wanted).abs() / (1 + wanted.abs())
            errors.append(float(error.max()) / torch.finfo(dtype).eps if rows else 0.0)
            alike += [torch.equal(triton_linear(x[:n], w, bias), y[0, :n])
                      for n in range(1, rows, 9)]
            assert torch.equal(triton_linear(x, w.T.contiguous().T, bias), y[0])
            scale = torch.rand(outputs, generator=generator) + 0.5
            small = w.to(torch.float8_e4m3fn)
            y = triton_scaled_linear(x, small, scale, bias)
            wanted = x.double() @ small.double().T * scale.double()
            wanted += 0 if bias is None else bias.double()
            error = (y.double() - wanted).abs() / (1 + wanted.abs())
            errors.append(float(error.max()) / torch.finfo(dtype).eps if rows else 0.0)
print(json.dumps({"error": max(errors), "alike": all(alike), "rows": len(alike)}))
"""


def test_products_are_right_however_many_rows_follow() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(SHAPES)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["error"] < 100  # in units of the last place
    assert found["rows"] > 50
    assert found["alike"]
