"""`make gpu-check` as far as it goes without a GPU: it runs, and it finds what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import correctness, same_bits
from workers.attention.reference import ReferenceAttention
from workers.layers.fp8 import dequantised
from workers.layers.linear_methods import LinearMethods
from workers.layers.row_tiles import tiled_linear

pytestmark = pytest.mark.cpu

# What a machine has that runs nothing but the check.
WITHOUT = ["grpc", "ray", "google.protobuf", "pydantic", "click", "pytest", "hypothesis"]
RUN = f"""
import runpy, sys
for name in {WITHOUT}:
    sys.modules[name] = None  # importing it fails
sys.modules["psutil"] = None
import tests.gpu.correctness, tests.gpu.timings
del sys.modules["psutil"]  # a CPU's memory is asked for, a GPU's isn't
runpy.run_module("tests.gpu", run_name="__main__", alter_sys=True)
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_it_runs_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = ["--device", "cpu", "--smoke", "--json", str(result)]

    # As a machine with a GPU has it: triton's interpreter would take minutes.
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-c", RUN, *options]
    subprocess.run(command, check=True, timeout=220, env=environment)

    found = json.loads(result.read_text())
    right = [check["what"] for check in found["checks"] if check["fault"] == ""]
    for checked in ("reference float32", "fp8 product bfloat16", "deterministic: tiny"):
        assert any(what.startswith(checked) for what in right)
    assert not any(check["fault"] for check in found["checks"])
    decode, *_, prefill, generate = found["timings"]
    assert decode["what"] == "tiny decode 1 rows"
    assert prefill["over_floor"] > 1
    assert generate["ratio"] > 0
    assert found["machine"]["bytes_per_s"] > 0


def test_it_finds_products_that_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        same_bits, "choose_methods", lambda *_, **__: LinearMethods(product=by_count, fp8=scaled)
    )

    def by_count(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight, bias) * (1 + len(rows) * 1e-3)

    scaled = dequantised(tiled_linear)

    verdicts = [*same_bits.check_products(torch.device("cpu"))]

    assert {verdict.what.split()[0] for verdict in verdicts if verdict.fault} == {"plain"}
    assert sum(bool(verdict.fault) for verdict in verdicts) == len(verdicts) / 2


@pytest.mark.full
def test_it_finds_a_backend_that_sees_one_token_less(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(ReferenceAttention):
        def attend(self, *tensors: torch.Tensor, **settings: object) -> torch.Tensor:
            return super().attend(*tensors, **settings | {"window": 99})

    monkeypatch.setattr(correctness, "BACKENDS", {"short": lambda *_, **__: Short()})

    verdicts = [*correctness.check_backends(torch.device("cpu"), quick=True)]

    wrong = [verdict.what for verdict in verdicts if verdict.fault]
    assert len(verdicts) == len(wrong) == 3
    assert "window 100" in wrong[1]
