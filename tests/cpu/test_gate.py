"""The gate as a process: one line of verdict, whatever the folder holds and whatever happens."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from tests.ranks import ROOT
from workers.gate import strict
from workers.gate.__main__ import _judge

pytestmark = pytest.mark.cpu

TIMEOUT_S = 60
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the gate itself has it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_folder(folder: Path, kind: str, **values: Any) -> Path:
    """A model folder with a configuration and no weights, as large as the class makes it."""
    CONFIG_MAPPING[kind](**values).save_pretrained(folder)
    return folder


def write_config(folder: Path, content: str) -> Path:
    (folder / "config.json").write_text(content)
    return folder


def ask(
    folder: Path, *, tp: int = 2, script: str | None = None, before: Sequence[str] = ()
) -> dict[str, Any]:
    """What a process of its own says; `script` is run in its place, `before` comes before it."""
    program = ["-m", "workers.gate"] if script is None else ["-c", script]
    process = subprocess.run(
        [*before, sys.executable, "-P", *program, str(folder), "--tp", str(tp)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        timeout=TIMEOUT_S,
        check=True,
    )
    (line,) = process.stdout.splitlines()
    verdict: dict[str, Any] = json.loads(line)
    assert verdict["tp"] == tp
    return verdict


def assert_accepted(verdict: dict[str, Any], architecture: str) -> None:
    assert verdict["accepted"], verdict["reason"]
    assert verdict["reason"] == ""
    assert verdict["architecture"] == architecture
    assert verdict["error"] < strict.BOUND
    assert verdict["is_certain"]
    assert verdict["is_split"]


def assert_refused(verdict: dict[str, Any], sentence: str) -> None:
    assert not verdict["accepted"]
    assert verdict["is_certain"]
    assert sentence in verdict["reason"]


@pytest.mark.full
def test_a_mixture_of_experts_of_full_size_is_accepted(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "glm4_moe", dtype="bfloat16")
    assert_accepted(ask(folder), "Glm4MoeForCausalLM")


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 3, 4])
def test_other_numbers_of_ranks(tmp_path: Path, tp: int) -> None:
    verdict = ask(make_folder(tmp_path, "olmoe"), tp=tp)
    assert verdict["accepted"], verdict["reason"]
    assert verdict["is_split"] == (tp > 1)


@pytest.mark.full
def test_a_checkpoint_with_a_part_for_images_is_accepted(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 12, "dtype": "bfloat16"}
    folder = make_folder(tmp_path, "gemma3", text_config=text, dtype="bfloat16")
    assert_accepted(ask(folder), "Gemma3ForCausalLM")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("mamba", "recurrent layers"),
        ("bloom", "BloomForCausalLM computes with the attention mask by itself (ALiBi"),
        ("falcon", "'falcon' has attention code of its own"),
        ("bart", "counts their positions by itself"),
    ],
)
def test_others_are_refused_with_the_reason(tmp_path: Path, kind: str, sentence: str) -> None:
    assert_refused(ask(make_folder(tmp_path, kind)), sentence)


@pytest.mark.full
def test_an_unreadable_configuration_is_a_verdict_too(tmp_path: Path) -> None:
    """Also where the process may have less memory than the gate allows itself."""
    verdict = ask(
        write_config(tmp_path, "{"), before=("sh", "-c", 'ulimit -d 8388608; exec "$@"', "")
    )
    assert not verdict["accepted"]
    assert not verdict["is_certain"], "it names this folder"
    assert f"{tmp_path}/config.json can't be read" in verdict["reason"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "config.json must hold a JSON object"),
        ("{}", "config.json can't be read"),
        ('{"model_type": "of_the_future"}', "of_the_future"),
        ('{"model_type": "vit"}', "'vit' has no causal language model in transformers"),
        ('{"model_type": ["llama"]}', "config.json can't be read"),
        ('{"model_type": "olmoe", "num_hidden_layers": "many"}', "config.json can't be read"),
        ('{"model_type": "olmoe", "num_hidden_layers": 0}', "never calls attention"),
        ('{"model_type": "olmoe", "num_attention_heads": 0}', "can't make a small copy"),
        ('{"model_type": "olmoe", "rope_parameters": {"rope_type": "odd"}}', "odd"),
        ('{"model_type": "olmoe", "quantization_config": {"quant_method": "x"}}', "quantization_c"),
        ('{"model_type": "olmoe", "hidden_act": "odd"}', "odd"),
        ('{"model_type": "qwen2_moe", "num_experts_per_tok": -1}', "Qwen2"),
    ],
)
def test_odd_configurations_are_refused(tmp_path: Path, content: str, sentence: str) -> None:
    verdict = _judge(write_config(tmp_path, content), 2)
    assert not verdict.accepted
    assert verdict.reason
    assert sentence in verdict.reason, verdict.reason


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    verdict = _judge(tmp_path / "nowhere", 2)
    assert not verdict.accepted
    assert "nowhere doesn't exist" in verdict.reason


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        RuntimeError("DefaultCPUAllocator: no room"),
        OSError(errno.ENOSPC, "no room"),
        ModuleNotFoundError("no room, for a package is missing"),
    ],
)
def test_what_may_pass_is_no_certain_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    verdict = _judge(make_folder(tmp_path, "olmoe"), 1)
    assert not verdict.accepted
    assert not verdict.is_certain
    assert "no room" in verdict.reason


# Rank 1 fails where rank 0 goes on to a collective, and waits there for ever.
FAILING = """
import os, sys
from workers.errors import ModelError
from workers.gate import __main__ as gate, strict

class Failing(strict.ModelExecutor):
    def __init__(self, config, *others):
        print("a library says something")
        os.write(1, b"in C too\\n")
        if config.rank == 1 and {at_load}:
            raise RuntimeError("rank 1 gives up")
        super().__init__(config, *others)

    def compute_logits(self, batch):
        if self._parallel.rank == 1:
            raise ModelError("rank 1 gives up")
        return super().compute_logits(batch)

strict.ModelExecutor = Failing
gate.main()
"""


@pytest.mark.full
@pytest.mark.parametrize("at_load", [False, True])
def test_a_rank_that_fails_ends_the_gate(tmp_path: Path, at_load: bool) -> None:
    folder = make_folder(tmp_path, "olmoe")
    verdict = ask(folder, script=FAILING.format(at_load=at_load))
    assert not verdict["accepted"]
    assert "rank 1 gives up" in verdict["reason"]
    assert verdict["is_certain"] != at_load  # what nobody refused on purpose may pass
