"""Gemma 3's text models, without transformers' reader.

That one gives the same weights, tokens and configuration for them, in ten times the time and twice
the memory: it takes 40 s for the embedded model, most of it for a Python object per metadata
element, and this 4 s.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from workers.errors import ModelError
from workers.gguf.configuration import complete_configuration, decimal
from workers.gguf.endings import write_json
from workers.gguf.file import CONTROL, USER_DEFINED, GgufFile, GgufTensor

ARCHITECTURE = "gemma3"

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


def write_gemma3(
    gguf: GgufFile, folder: Path, *, dtype: torch.dtype, on_message: Callable[[str], None]
) -> None:
    """Writes config.json, the tokenizer and model.safetensors.

    Raises ModelError: the file isn't that of a Gemma 3 text model, or something in it is damaged.
    """
    write_config(gguf, folder, dtype)
    write_tokenizer(gguf, folder)
    on_message("tokenizer written")
    write_weights(gguf, folder, dtype)


def write_config(gguf: GgufFile, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json.

    What a file doesn't tell (the first models' layer pattern and local rotary base, activation) is
    the default of transformers' class.
    """
    # Imported here: transformers takes 2 s, and a wrong file should be refused at once.
    from transformers import Gemma3TextConfig

    def field(name: str) -> Any:
        return gguf[f"{ARCHITECTURE}.{name}"]

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
        sliding_window=field("attention.sliding_window"),
        rms_norm_eps=decimal(field("attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": field("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        tie_word_embeddings="output.weight" not in gguf.tensors,
        bos_token_id=gguf["tokenizer.ggml.bos_token_id"],
        eos_token_id=gguf["tokenizer.ggml.eos_token_id"],
        pad_token_id=gguf["tokenizer.ggml.padding_token_id"],
    )
    complete_configuration(config, gguf)
    config.save_pretrained(folder)


def write_weights(gguf: GgufFile, folder: Path, dtype: torch.dtype) -> None:
    """Writes model.safetensors. Raises ModelError: a tensor is missing or unknown."""
    names = dict(_tensor_names(gguf["gemma3.block_count"]))
    if missing := sorted(set(names) - set(gguf.tensors)):
        raise ModelError(f"{gguf.path}: {len(missing)} tensors are missing, such as {missing[0]!r}")
    if unknown := sorted(set(gguf.tensors) - set(names)):
        raise ModelError(f"{gguf.path}: tensor {unknown[0]!r} is none of a Gemma 3 text model")
    weights = {names[name]: _weight(tensor, dtype) for name, tensor in gguf.tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
        f"{name}_token": gguf.token(f"tokenizer.ggml.{key}_token_id")
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
    # Its own `save` raises Exception itself where the disk is full.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {"tokenizer_class": "GemmaTokenizer", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings | names)
    if (template := gguf.metadata.get("tokenizer.chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


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
