"""What real workers computed, computed again."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.config import EngineConfig
from runtime.llm import LLM
from runtime.model_replay import replay_model
from runtime.recording.reader import Recording, open_recording
from runtime.recording.replay import replay_scheduler
from runtime.sampling_params import SamplingParams
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(500)]

TEXT = [*range(3, 60)]
OPTIONS = {"block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": 8, "launcher": "local"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def recording(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("recording")
    config = EngineConfig(model=str(model), tp=2, record=str(folder), record_steps=True, **OPTIONS)
    with LLM.from_config(config, progress=False) as llm:
        plain = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
        penalized = SamplingParams(
            max_tokens=20, ignore_eos=True, n=2, repetition_penalty=1.2, seed=2, logprobs=1
        )
        scored = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0)
        prompts = [TEXT[:40], TEXT[:50], [*TEXT[:33], 5, 6], TEXT[:20], [9, 8, 7]]
        llm.generate(prompts, [plain, penalized, plain, scored, penalized], progress=False)
        llm.generate([[*TEXT[:40], 4]], plain, progress=False)
    return open_recording(folder)


def last_step(recording: Recording) -> int:
    return max(each.plan.step_id for each in recording.records() if each.HasField("plan"))


def test_its_scheduler_decides_alike(recording: Recording) -> None:
    verdict = replay_scheduler(recording.records(recording.scheduler_start()))
    assert (verdict.difference, verdict.num_steps) == (None, last_step(recording))


def test_all_steps_and_a_middle_segment_give_the_same_tokens(
    recording: Recording, model: Path
) -> None:
    """On one rank, where they ran on two; on the blocks that they touch alone."""
    config = EngineConfig(model=str(model), launcher="local", pipeline_depth=1)
    num_steps = last_step(recording)
    whole = replay_model(recording, config)
    assert (whole.difference, whole.num_steps, whole.num_prefilled) == (None, num_steps, 0)
    middle = replay_model(recording, config, first_step=num_steps // 2, num_steps=10)
    assert (middle.difference, middle.num_steps) == (None, 10)
    assert middle.num_prefilled > 50
    assert middle.num_blocks < whole.num_blocks


def test_the_embedded_model_from_its_first_and_from_a_middle_segment(tmp_path: Path) -> None:
    """In float32: see `lockstep replay --help`."""
    config = EngineConfig(dtype="float32", kv_memory=64 << 20, launcher="local")
    recorded = replace(config, record=str(tmp_path), record_steps=True)
    prompts = ["The capital of France is", "Once upon a time", "def f(n):", "1 2 3 4 5"]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=i) for i in range(len(prompts))]
    with LLM.from_config(recorded, progress=False) as llm:
        llm.generate(prompts, params, progress=False)
    recording = open_recording(tmp_path)
    for first, num_steps in ((None, None), (12, 8)):
        verdict = replay_model(recording, config, first_step=first, num_steps=num_steps)
        assert verdict.difference is None
        assert verdict.num_tokens == len(prompts) * (num_steps or 24)


def test_the_command(recording: Recording, model: Path) -> None:
    folder = recording.files[0].path.parent
    part = ["--from-step", "5", "--steps", "3", "--tp", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "replay", str(folder), "--model", str(model), *part],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"run {recording.header.run}: 3 steps, " in done.stdout
    assert "tokens as recorded" in done.stdout
