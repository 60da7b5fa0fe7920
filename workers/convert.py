"""Turns a Gemma 3 GGUF file into a Hugging Face folder: `python -m workers.convert --help`.

Weights are dequantised and stored in bfloat16, the number format that Gemma 3 was published in.
The folder appears under its name only when it is complete.
"""

import argparse
import json
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from workers.errors import ModelError
from workers.gguf_file import GgufFile, GgufTensor, open_gguf

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ARCHITECTURE = "gemma3"

# Kinds of tokens in `tokenizer.ggml.token_type`.
CONTROL, USER_DEFINED = 3, 4

# GGUF names, those of a layer without `blk.N.`, and where transformers' Gemma3ForCausalLM has them.
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


def convert(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    on_message: Callable[[str], None],
) -> None:
    """Writes config.json, generation_config.json, tokenizer files and model.safetensors.

    Everything goes into a sibling folder first, so a killed conversion leaves nothing that looks
    finished; of two conversions at once the first to finish stays.
    Raises ModelError: `source` is no Gemma 3 GGUF file, or `target` exists.
    """
    if target.exists():
        raise ModelError(f"{target} already exists: remove it or name another folder")
    gguf = open_gguf(source)
    architecture = gguf["general.architecture"]
    if architecture != ARCHITECTURE:
        raise ModelError(
            f"{source}: general.architecture={architecture!r} must be {ARCHITECTURE!r}: "
            "other models are served from their safetensors folder"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        write_config(gguf, unfinished, dtype)
        write_tokenizer(gguf, unfinished)
        on_message("tokenizer written")
        write_weights(gguf, unfinished, dtype)
        on_message(f"{len(gguf.tensors)} tensors written")
        _publish(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _publish(unfinished: Path, target: Path) -> None:
    try:
        unfinished.rename(target)
    except OSError:
        # A conversion that ran at the same time was faster, and its folder is complete too.
        if not (target / "config.json").is_file():
            raise


def write_config(gguf: GgufFile, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json and generation_config.json.

    What a GGUF file doesn't tell (layer pattern, local rotary base, activation) is the same in all
    Gemma 3 text models and is the default of transformers' class.
    """
    # Imported here: transformers takes 2 s, and a wrong file should be refused at once.
    from transformers import Gemma3TextConfig

    def field(name: str) -> Any:
        return gguf[f"{ARCHITECTURE}.{name}"]

    ids = {
        "bos_token_id": gguf["tokenizer.ggml.bos_token_id"],
        "eos_token_id": gguf["tokenizer.ggml.eos_token_id"],
        "pad_token_id": gguf["tokenizer.ggml.padding_token_id"],
    }
    config = Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        dtype=dtype,
        vocab_size=len(gguf["tokenizer.ggml.tokens"]),
        max_position_embeddings=field("context_length"),
        hidden_size=field("embedding_length"),
        num_hidden_layers=field("block_count"),
        intermediate_size=field("feed_forward_length"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"),
        query_pre_attn_scalar=field("attention.key_length"),
        sliding_window=field("attention.sliding_window"),
        rms_norm_eps=_decimal(field("attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": field("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        tie_word_embeddings="output.weight" not in gguf.tensors,
        **ids,
    )
    config.save_pretrained(folder)
    _write_json(folder / "generation_config.json", ids)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _decimal(value: float) -> float:
    """The shortest decimal that is `value` in float32: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def write_weights(gguf: GgufFile, folder: Path, dtype: torch.dtype) -> None:
    """Writes model.safetensors. Raises ModelError: a tensor is missing or unknown."""
    names = dict(_tensor_names(gguf["gemma3.block_count"]))
    if missing := sorted(set(names) - set(gguf.tensors)):
        raise ModelError(f"{gguf.path}: {len(missing)} tensors are missing, such as {missing[0]!r}")
    if unknown := sorted(set(gguf.tensors) - set(names)):
        raise ModelError(f"{gguf.path}: tensor {unknown[0]!r} is none of a Gemma 3 text model")
    weights = {names[name]: _weight(tensor, dtype) for name, tensor in gguf.tensors.items()}
    file = folder / "model.safetensors"
    file.touch()
    mode = file.stat().st_mode
    save_file(weights, file, metadata={"format": "pt"})
    # safetensors makes its files readable by the owner alone; the umask should decide.
    file.chmod(mode)


def _tensor_names(num_layers: int) -> Iterator[tuple[str, str]]:
    yield from MODEL_TENSORS.items()
    for layer in range(num_layers):
        for theirs, ours in LAYER_TENSORS.items():
            yield f"blk.{layer}.{theirs}", f"model.layers.{layer}.{ours}"


def _weight(tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
    values = tensor.values()
    if tensor.name.endswith("norm.weight"):
        # Gemma scales by 1 + weight; GGUF files have the 1 added.
        values = values - 1
    return torch.from_numpy(values).to(dtype)


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, in the layout of Gemma's own."""
    if (kind := gguf["tokenizer.ggml.model"]) != "llama":
        raise ModelError(f"{gguf.path}: tokenizer.ggml.model={kind!r} must be 'llama'")
    # Runs of spaces stand in the file as spaces, where the vocabulary has the mark for a space.
    pieces = [
        "\u2581" * len(piece) if piece and not piece.strip(" ") else piece
        for piece in gguf["tokenizer.ggml.tokens"]
    ]
    names = {
        f"{name}_token": _piece(gguf, pieces, f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    tokenizer = _build_tokenizer(pieces, unk_token=names["unk_token"])
    kinds = gguf["tokenizer.ggml.token_type"].tolist()
    marked = list(zip(pieces, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(piece, normalized=False) for piece, kind in marked if kind == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(piece, normalized=False) for piece, kind in marked if kind == USER_DEFINED]
    )
    if gguf["tokenizer.ggml.add_bos_token"]:
        bos = names["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, gguf["tokenizer.ggml.bos_token_id"])],
        )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "GemmaTokenizer", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings | names)


def _piece(gguf: GgufFile, pieces: list[str], key: str) -> str:
    token: int = gguf[key]
    if not 0 <= token < len(pieces):
        raise ModelError(f"{gguf.path}: {key}={token} must be in [0, {len(pieces)})")
    return pieces[token]


def _build_tokenizer(pieces: list[str], *, unk_token: str) -> Tokenizer:
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=list(_merges(vocabulary)),
            unk_token=unk_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges(vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The merges that a vocabulary implies, best first.

    A GGUF file leaves them out. Gemma's merge order is that of the pieces they make; of several
    ways to make one, the longest left part comes first.
    """
    for piece in vocabulary:
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                yield left, right


def main() -> None:
    """The command. Exits with 1 and one sentence where the file can't be converted."""
    parser = argparse.ArgumentParser(prog="python -m workers.convert", description=__doc__)
    parser.add_argument("source", type=Path, help="GGUF file of a Gemma 3 text model")
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="stored number format")
    arguments = parser.parse_args()
    # The default action would skip the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        convert(
            arguments.source,
            arguments.target,
            dtype=DTYPES[arguments.dtype],
            on_message=lambda message: print(message, flush=True),
        )
    except ModelError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
