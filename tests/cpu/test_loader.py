"""Checkpoints that can't be served are refused by name before any weight is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import checkpoints
from tests.tiny_models import load_executor, save_tiny_model
from workers.errors import ModelError

pytestmark = pytest.mark.cpu

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return save_tiny_model(tmp_path / "llama", "llama")


@pytest.fixture
def parted(tmp_path):
    folder = save_tiny_model(tmp_path / "llama", "llama", shard_size="200KB")
    assert (folder / INDEX).is_file()
    return folder


def refusal(folder: Path) -> str:
    reports: list[tuple[int, int]] = []
    with pytest.raises(ModelError) as refused:
        load_executor(folder, on_progress=lambda *report: reports.append(report))
    assert reports == []
    return str(refused.value)


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    checkpoints.change_tensors(folder / SINGLE, **tensors)


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_parts_load_like_one_file(parted):
    assert load_executor(parted).spec.parameter_bytes > 0


def test_an_unknown_folder(tmp_path):
    assert refusal(tmp_path / "none") == f"model folder {tmp_path / 'none'} doesn't exist"


def test_no_config(folder):
    (folder / "config.json").unlink()

    assert refusal(folder).startswith(f"{folder / 'config.json'} is missing")


@pytest.mark.parametrize("content", ["{", "[]", "\x00", '{"model_type": "none-such"}'])
def test_an_unreadable_config(folder, content):
    (folder / "config.json").write_text(content)

    assert str(folder / "config.json") in refusal(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "x"},
        {"dtype": []},
        {"num_attention_heads": 0},
        {"head_dim": -1},
        {"pad_token_id": 1 << 40},
    ],
)
def test_a_config_that_makes_no_sense(folder, fields):
    change_config(folder, **fields)

    assert refusal(folder)


def test_a_model_that_generates_no_text(folder):
    change_config(folder, model_type="vit")

    assert "'vit' has no causal language model" in refusal(folder)


@pytest.mark.parametrize(
    ("kind", "reach"), [("dynamic", 256), ("longrope", 64), ("linear", 256), ("default", 256)]
)
def test_positions_end_where_they_would_depend_on_batch_mates(folder, kind, reach):
    """LongRoPE has other frequencies past the original positions, for the whole batch."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
        rope |= factors | {"original_max_position_embeddings": 64}
    change_config(folder, rope_parameters=rope)

    assert load_executor(folder).spec.max_model_len == reach


def test_a_quantised_checkpoint(folder):
    change_config(folder, quantization_config={"quant_method": "fp8"})

    assert "quantization_config isn't built" in refusal(folder)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file(folder, size):
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:size])

    message = refusal(folder)

    assert str(path) in message
    assert "truncated" in message


def test_a_truncated_part(parted):
    path = next(parted.glob("model-00002*"))
    path.write_bytes(path.read_bytes()[:-1])

    message = refusal(parted)

    assert message.startswith(f"{path} is truncated: of ")
    assert "up to the end of" in message


def test_a_missing_tensor(folder):
    change_tensors(folder, **{"model.norm.weight": None})

    assert refusal(folder) == f"{folder / SINGLE} lacks model.norm.weight"


def test_a_tensor_that_no_part_has(parted):
    part = next(file for file in parted.glob("model-*") if "model.norm.weight" in load_file(file))
    checkpoints.change_tensors(part, **{"model.norm.weight": None})
    path = parted / INDEX
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))

    assert refusal(parted) == f"the checkpoint in {parted} lacks model.norm.weight"


def test_a_tensor_of_another_shape(folder):
    change_tensors(folder, **{"model.norm.weight": torch.zeros(65)})

    message = refusal(folder)

    assert "model.norm.weight has shape [65], but config.json makes it [64]" in message
    assert str(folder / SINGLE) in message


def test_an_unknown_tensor(folder):
    change_tensors(folder, **{"model.layers.0.lora.weight": torch.zeros(2)})

    known = "LlamaForCausalLM doesn't know: model.layers.0.lora.weight (model.safetensors)"
    assert refusal(folder) == f"the checkpoint in {folder} has tensors that {known}"


def test_an_unknown_tensor_that_the_index_leaves_out(parted):
    part = next(parted.glob("model-00002*"))
    checkpoints.change_tensors(part, **{"model.layers.0.lora.weight": torch.zeros(2)})

    assert refusal(parted).endswith(f"doesn't know: model.layers.0.lora.weight ({part.name})")


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_a_quantised_tensor(folder, dtype, name):
    change_tensors(folder, **{"model.norm.weight": torch.zeros(64).to(dtype)})

    assert refusal(folder) == (
        f"{folder / SINGLE}: model.norm.weight is stored as {name}, must be one of F64, F32, F16, "
        "BF16: quantised checkpoints aren't served"
    )


def test_stored_frequencies_are_left_aside(folder):
    change_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})

    assert load_executor(folder).spec.architecture == "LlamaForCausalLM"


def test_a_tied_head_is_stored_once_or_twice(tmp_path):
    folder = save_tiny_model(tmp_path, "llama-biased")
    assert "lm_head.weight" not in load_file(folder / SINGLE)
    once = load_executor(folder).spec

    change_tensors(
        folder, **{"lm_head.weight": load_file(folder / SINGLE)["model.embed_tokens.weight"]}
    )

    assert load_executor(folder).spec.parameter_bytes == once.parameter_bytes


def test_a_head_that_differs_from_the_embedding_it_is_tied_to(tmp_path, caplog, torch_products):
    """Against the configuration they are left apart, as in transformers."""
    folder = save_tiny_model(tmp_path, "llama-biased")
    head = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    head[-1, -1] += 1
    change_tensors(folder, **{"lm_head.weight": head})

    model = load_executor(folder)._model.module

    assert model.lm_head.weight.equal(head)
    assert not model.get_input_embeddings().weight.equal(head)
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text


def test_auto_is_the_format_of_the_weights_where_no_configuration_tells(folder):
    tensors = load_file(folder / SINGLE)
    change_tensors(folder, **{name: tensor.bfloat16() for name, tensor in tensors.items()})
    change_config(folder, dtype=None, torch_dtype=None)

    assert load_executor(folder)._model.module.dtype == torch.bfloat16


def test_two_names_for_one_tensor(folder):
    change_tensors(folder, **{"norm.weight": torch.ones(64)})

    assert "model.norm.weight and norm.weight are both model.norm.weight" in refusal(folder)


def test_weights_that_are_no_numbers(folder):
    norm = load_file(folder / SINGLE)["model.norm.weight"]
    norm[3] = float("nan")
    change_tensors(folder, **{"model.norm.weight": norm})

    with pytest.raises(ModelError, match=r"numbers that aren't finite in torch\.float32"):
        load_executor(folder)


def test_progress_counts_bytes_up_to_the_total_known_before(folder):
    reports: list[tuple[int, int]] = []

    executor = load_executor(folder, on_progress=lambda *report: reports.append(report))

    loaded, totals = zip(*reports, strict=True)
    assert loaded[0] == 0
    assert list(loaded) == sorted(set(loaded))
    assert set(totals) == {executor.spec.parameter_bytes} == {loaded[-1]}


@pytest.mark.parametrize(("ids", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, ())])
def test_end_of_text_ids(folder, ids, expected):
    change_config(folder, eos_token_id=9)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert load_executor(folder).spec.eos_token_ids == expected

    (folder / "generation_config.json").unlink()
    assert load_executor(folder).spec.eos_token_ids == (9,)
