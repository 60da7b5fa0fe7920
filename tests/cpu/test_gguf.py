"""Decoders of other architectures, through transformers' own reader."""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

pytest.importorskip("gguf", reason="the gguf extra isn't installed")
pytest.importorskip("accelerate", reason="the gguf extra isn't installed")

from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
)

from runtime.model_files import resolve_model
from tests.gguf_files import (
    DECODER_KEYS,
    DECODER_SIZES,
    F16,
    F32,
    Q8_0,
    VOCABULARY,
    byte_level_tokens,
    decoder_tensors,
    make_decoder,
    sentencepiece_tokens,
    train_byte_level,
    write_decoder,
)
from tests.quick import quick
from tests.tiny_models import BOUND, Feeder, error_in_std, forced_logits, load_executor
from workers.convert import convert
from workers.errors import ModelError

pytestmark = pytest.mark.cpu

LLAMA_KEYS = DECODER_KEYS | {"rope.dimension_count": 16, "vocab_size": VOCABULARY}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_MOE_KEYS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "attention.key_length": 32,
    "attention.value_length": 32,
}


def qwen_tokens() -> Callable[[Any], None]:
    return byte_level_tokens(train_byte_level(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), "qwen2")


def write_tiny(
    path: Path,
    *,
    arch: str = "llama",
    config: PreTrainedConfig | None = None,
    tokens: Callable[[Any], None] = sentencepiece_tokens,
    keys: dict[str, Any] | None = None,
    kind: Any = F32,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> Path:
    model = make_decoder(config or LlamaConfig(**DECODER_SIZES))
    tensors = decoder_tensors(model, arch)
    change(tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_decoder(path, arch, tensors, keys or LLAMA_KEYS, tokens=tokens, kind=kind)


def convert_tiny(tmp_path: Path, **options: Any) -> Path:
    source = write_tiny(tmp_path / "in" / "tiny.gguf", **options)
    convert(source, tmp_path / "out", dtype=torch.float32, on_message=print)
    return tmp_path / "out"


def texts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (35, 19)]


def logits_of(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([text])).logits[0].clone() for text in texts()]


KINDS = {"F16": F16, "Q8_0": Q8_0}
FAMILIES = {
    "llama": ("llama", LlamaConfig(**DECODER_SIZES), sentencepiece_tokens, LLAMA_KEYS),
    "qwen2": (
        "qwen2",
        Qwen2Config(**DECODER_SIZES, tie_word_embeddings=True),
        qwen_tokens(),
        DECODER_KEYS,
    ),
}


@pytest.mark.parametrize(
    ("family", "kind"),
    quick(product(FAMILIES, ["F16", "Q8_0"]), ("llama", "Q8_0"), ("qwen2", "F16")),
)
def test_a_converted_model_equals_transformers_own_reading(
    family: str, kind: str, tmp_path: Path
) -> None:
    arch, config, tokens, keys = FAMILIES[family]
    folder = convert_tiny(
        tmp_path, arch=arch, config=config, tokens=tokens, keys=dict(keys), kind=KINDS[kind]
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "in", gguf_file="tiny.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    found = forced_logits(Feeder(load_executor(folder, dtype="float32")), texts())
    assert found is not None
    assert error_in_std(found, logits_of(theirs)) < BOUND
    # So do the weights that were quantised, but only about.
    assert error_in_std(found, logits_of(make_decoder(config))) > 10 * BOUND


@pytest.mark.parametrize(
    ("arch", "config", "tokens", "keys"),
    [
        *FAMILIES.values(),
        (
            "qwen3moe",
            Qwen3MoeConfig(**DECODER_SIZES, **QWEN_MOE, head_dim=32, norm_topk_prob=True),
            qwen_tokens(),
            DECODER_KEYS | QWEN_MOE_KEYS,
        ),
    ],
    ids=[*FAMILIES, "qwen3moe"],
)
def test_a_converted_model_is_the_one_that_was_written(
    arch: str, config: PreTrainedConfig, tokens: Any, keys: Any, tmp_path: Path
) -> None:
    folder = convert_tiny(tmp_path, arch=arch, config=config, tokens=tokens, keys=dict(keys))
    ours = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert error_in_std(logits_of(ours), logits_of(make_decoder(config))) == 0


def test_llama31s_rotary_factors_are_found_again(tmp_path: Path) -> None:
    """The file holds what comes of the scaling's settings, which transformers doesn't read."""
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }
    sizes = DECODER_SIZES | {"max_position_embeddings": 16_384}
    config = LlamaConfig(**sizes, rope_parameters=scaling)
    model = make_decoder(config)
    plain = 500_000.0 ** -(np.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    keys = LLAMA_KEYS | {"rope.freq_base": 500_000.0, "context_length": 16_384}

    def add(values: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
        return lambda tensors: tensors.update({"rope_freqs.weight": values.astype(np.float32)})

    folder = convert_tiny(tmp_path, config=config, keys=keys, change=add(factors))
    ours = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert ours.config.rope_parameters == scaling
    assert error_in_std(logits_of(ours), logits_of(model)) == 0
    with pytest.raises(ModelError, match=r"rope_freqs\.weight holds other factors"):
        convert_tiny(tmp_path / "other", config=config, keys=keys, change=add(factors * 1.01))


def drop(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.__delitem__(name)


def add(name: str, *shape: int) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"change": drop("blk.1.attn_k.weight")},
            r"no tensor of the file is model\.layers\.1\.self_attn\.k_proj\.weight",
        ),
        (
            {"change": add("blk.1.attn_k.bias", 32)},
            r"so it would be another model: it leaves out blk\.1\.attn_k\.bias$",
        ),
        (
            {"change": add("blk.1.ffn_down.weight", 64, 64)},
            r"layers\.1\.mlp\.down_proj\.weight has shape \[64, 64\] in the file, and \[64, 96\]",
        ),
        ({"keys": LLAMA_KEYS | {"rope.scale": 2.0}}, r"llama\.rope\.scale=2\.0 has no place in L"),
        (
            {"arch": "olmo2", "keys": DECODER_KEYS},
            r"architecture olmo2 is not supported.*must be one of .*, llama, .*, qwen3_moe, ",
        ),
        # Before memory is taken for them.
        (
            {"keys": LLAMA_KEYS | {"block_count": 10**9}},
            r"llama\.block_count=1000000000 must be 2, the number of blocks whose tensors the file",
        ),
        (
            {"keys": LLAMA_KEYS | {"vocab_size": 10**9}},
            r"by its metadata the model has 128000061760 numbers, and the file holds 102720$",
        ),
        ({"keys": LLAMA_KEYS | {"attention.head_count": 0}}, r"configuration: ZeroDivisionError"),
    ],
    ids=[
        *("missing", "unknown", "shape", "key", "architecture", "blocks", "vocabulary"),
        "no heads",
    ],
)
def test_what_would_be_another_model_is_refused(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    arch = options.pop("arch", "llama")
    source = write_tiny(tmp_path / "in" / "tiny.gguf", **options)
    if arch != "llama":
        source.write_bytes(source.read_bytes().replace(b"llama", arch.encode()))
    with pytest.raises(ModelError, match=sentence):
        convert(source, tmp_path / "out" / "tiny", on_message=print)
    assert not list((tmp_path / "out").glob("*"))


def test_what_lies_beside_the_file_is_not_read(tmp_path: Path) -> None:
    beside = tmp_path / "in"
    beside.mkdir()
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json", "adapter_config.json"):
        (beside / name).write_text("{")
    folder = convert_tiny(tmp_path)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("ab") is not None


def test_a_gguf_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `--model` to a folder that workers read, through a process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_tiny(tmp_path / "in" / "tiny.gguf")
    messages: list[str] = []
    folder = resolve_model(str(source), messages.append)
    assert messages[1:] == ["tokenizer written", "21 tensors written"]
    executor = load_executor(Path(folder))
    assert executor.spec.eos_token_ids == (2,)
    assert resolve_model(str(source), messages.append) == folder
    assert len(messages) == 3
