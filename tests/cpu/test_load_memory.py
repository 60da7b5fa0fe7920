"""Loading takes a rank's shard and little more: no rank ever holds the whole model."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.checkpoints import Build, build_meta
from tests.loading_ranks import measure_loading

pytestmark = pytest.mark.cpu

MB = 1_000_000

LLAMA = {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False}
MIXTRAL = LLAMA | {"num_local_experts": 8}


def llama(**sizes: int) -> Build:
    return lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | sizes))


def mixtral(**sizes: int) -> Build:
    """Its experts are stored one by one, and merged when they are loaded."""
    return lambda: MixtralForCausalLM(MixtralConfig(**MIXTRAL | sizes))


SMALL = mixtral(hidden_size=512, intermediate_size=1024, num_hidden_layers=7, vocab_size=8_000)
LARGE = {
    "llama": llama(
        hidden_size=4096, intermediate_size=11_008, num_hidden_layers=4, vocab_size=40_000
    ),
    "mixtral": mixtral(
        hidden_size=2048, intermediate_size=4096, num_hidden_layers=4, vocab_size=40_000
    ),
}


def save_large(build: Build, folder: Path, *, shard_size: str) -> int:
    """A checkpoint of random numbers in bfloat16; returns its bytes."""
    model = build_meta(build).to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def check_growth(build: Build, work: Path, *, shard_size: str, allowed_bytes: int) -> int:
    """Loads a model at two ranks; returns the bytes of its checkpoint."""
    folder = work / "model"
    try:
        whole_bytes = save_large(build, folder, shard_size=shard_size)
        ranks = measure_loading(folder, 2, work, timeout_s=300)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for rank in ranks:
        assert rank.shard_bytes < 0.55 * whole_bytes
        # What was measured is the loading: the shard itself is in it.
        assert rank.anonymous_bytes > 0.9 * rank.shard_bytes
        assert rank.anonymous_bytes < rank.shard_bytes + allowed_bytes
    return whole_bytes


@pytest.mark.full
def test_loading_takes_little_more_than_the_shard(tmp_path):
    whole_bytes = check_growth(SMALL, tmp_path, shard_size="50MB", allowed_bytes=60 * MB)

    assert whole_bytes > 180 * MB


@pytest.mark.full
def test_weights_of_8_bits_are_never_there_in_16(tmp_path):
    """Neither whole nor a rank's part: a few outputs at a time are."""
    build = llama(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=2_000)
    whole_bytes = save_large(build, tmp_path / "model", shard_size="50MB")

    for rank in measure_loading(tmp_path / "model", 2, tmp_path, timeout_s=100, quantization="fp8"):
        assert rank.shard_bytes < 0.3 * whole_bytes
        assert rank.anonymous_bytes > 0.9 * rank.shard_bytes
        assert rank.anonymous_bytes < rank.shard_bytes + 30 * MB
    assert whole_bytes > 180 * MB


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", LARGE)
def test_loading_two_gigabytes_takes_at_most_300_mb_more_than_the_shard(tmp_path, kind):
    whole_bytes = check_growth(LARGE[kind], tmp_path, shard_size="500MB", allowed_bytes=300 * MB)

    assert whole_bytes > 1900 * MB
