"""Small GGUF files, written as llama.cpp's converters write them. Needs the package gguf."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
Q8_0 = gguf.GGMLQuantizationType.Q8_0

GEMMA_PIECES = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<tag>",
    "  ",
    *"ab\u2581",
    "ab",
    "\u2581ab",
    "aab",
]
GEMMA_KINDS = [CONTROL] * 4 + [USER_DEFINED] * 2 + [NORMAL] * 6
GEMMA_HIDDEN, GEMMA_HEADS, GEMMA_HEAD_DIM, GEMMA_FEED_FORWARD = 64, 2, 32, 96


def make_gemma_tensors() -> dict[str, np.ndarray]:
    """One layer; values are ramps, so that no two tensors of a shape are equal."""
    shapes = {
        "token_embd": (len(GEMMA_PIECES), GEMMA_HIDDEN),
        "output_norm": (GEMMA_HIDDEN,),
        "blk.0.attn_norm": (GEMMA_HIDDEN,),
        "blk.0.attn_q": (GEMMA_HEADS * GEMMA_HEAD_DIM, GEMMA_HIDDEN),
        "blk.0.attn_k": (GEMMA_HEAD_DIM, GEMMA_HIDDEN),
        "blk.0.attn_v": (GEMMA_HEAD_DIM, GEMMA_HIDDEN),
        "blk.0.attn_q_norm": (GEMMA_HEAD_DIM,),
        "blk.0.attn_k_norm": (GEMMA_HEAD_DIM,),
        "blk.0.attn_output": (GEMMA_HIDDEN, GEMMA_HEADS * GEMMA_HEAD_DIM),
        "blk.0.post_attention_norm": (GEMMA_HIDDEN,),
        "blk.0.ffn_norm": (GEMMA_HIDDEN,),
        "blk.0.ffn_gate": (GEMMA_FEED_FORWARD, GEMMA_HIDDEN),
        "blk.0.ffn_up": (GEMMA_FEED_FORWARD, GEMMA_HIDDEN),
        "blk.0.ffn_down": (GEMMA_HIDDEN, GEMMA_FEED_FORWARD),
        "blk.0.post_ffw_norm": (GEMMA_HIDDEN,),
    }
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        ramp = np.linspace(-1, 1 + number, int(np.prod(shape)), dtype=np.float32)
        tensors[f"{name}.weight"] = ramp.reshape(shape)
    return tensors


def write_gemma(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    arch: str = "gemma3",
    packed: str = "",
    more: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """`packed` names a tensor that is stored as Q8_0, `more` writes further metadata."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(GEMMA_HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(GEMMA_FEED_FORWARD)
    writer.add_head_count(GEMMA_HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(GEMMA_HEAD_DIM)
    writer.add_value_length(GEMMA_HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(GEMMA_PIECES)
    writer.add_token_scores([0.0] * len(GEMMA_PIECES))
    writer.add_token_types(GEMMA_KINDS)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    more(writer)
    for name, values in tensors.items():
        _add_tensor(writer, name, values, Q8_0 if name == packed else F32)
    return _write(writer, path)


VOCABULARY = 320
DECODER_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DECODER_KEYS: Mapping[str, int | float] = {
    "context_length": 128,
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10_000.0,
}


def make_decoder(config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose every parameter is random enough to matter."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            # Vectors are norms and biases: kept near what they are, but all different.
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    return model.eval()


def decoder_tensors(model: PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    """The model's tensors as a file has them."""
    config = model.config
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        # llama.cpp turns neighbours with the position, transformers the halves of a head.
        if arch == "llama" and ".q_proj." in name:
            values = _interleave(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = _interleave(values, config.num_key_value_heads)
        place = name.removeprefix("model.layers.").split(".")[0]
        if name.endswith(".experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            tensors[f"blk.{place}.ffn_gate_exps.weight"] = gate
            tensors[f"blk.{place}.ffn_up_exps.weight"] = up
        elif name.endswith(".experts.down_proj"):
            tensors[f"blk.{place}.ffn_down_exps.weight"] = values
        else:
            tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_decoder(
    path: Path,
    arch: str,
    tensors: Mapping[str, np.ndarray],
    keys: Mapping[str, int | float | str],
    *,
    tokens: Callable[[Any], None],
    kind: gguf.GGMLQuantizationType = F32,
) -> Path:
    """`keys` are those of the architecture, `tokens` writes the tokenizer; vectors stay in F32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{arch}.{key}", value)
    tokens(writer)
    for name, values in tensors.items():
        _add_tensor(writer, name, values, kind if values.ndim > 1 else F32)
    return _write(writer, path)


def train_byte_level(split: str) -> Tokenizer:
    """A tokenizer as in GGUF files of kind gpt2, VOCABULARY tokens, the last four special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        ["the scheduler schedules the steps of the sequences, 1234 of them, don't you see"] * 3,
        trainers.BpeTrainer(vocab_size=VOCABULARY - 4, initial_alphabet=alphabet),
    )
    missing = VOCABULARY - 4 - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"filler{number}" for number in range(missing)])
    tokenizer.add_special_tokens(["<|begin|>", "<|end_of_text|>", "<|im_end|>", "<|tool|>"])
    return tokenizer


def byte_level_tokens(
    tokenizer: Tokenizer, pre: str | None, *, pieces: Mapping[int, str] | None = None
) -> Callable[[Any], None]:
    """Writes `tokenizer`; `pieces` replaces some of its tokens."""

    def write(writer: Any) -> None:
        vocabulary = {token: piece for piece, token in tokenizer.get_vocab().items()}
        vocabulary |= pieces or {}
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([vocabulary[token] for token in range(VOCABULARY)])
        writer.add_token_types([NORMAL] * (VOCABULARY - 4) + [CONTROL] * 4)
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_bos_token_id(VOCABULARY - 4)
        writer.add_eos_token_id(VOCABULARY - 3)

    return write


SENTENCEPIECES = ("\u2581", "a", "b", "\u2581a", "ab", "\u2581ab")


def sentencepiece_tokens(writer: Any) -> None:
    """Three special tokens, 256 bytes, SENTENCEPIECES, the best first, and fillers."""
    fillers = [f"filler{number}" for number in range(VOCABULARY - 259 - len(SENTENCEPIECES))]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces: Sequence[str] = ["<unk>", "<s>", "</s>", *data, *SENTENCEPIECES, *fillers]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(place) for place in range(VOCABULARY)])
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    writer.add_token_types(kinds + [NORMAL] * (VOCABULARY - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _add_tensor(
    writer: Any, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if kind == Q8_0:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values.astype(np.float16 if kind == F16 else np.float32))


def _write(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
