"""A tiny model with random weights, which samples every byte: steps take little but overhead."""

from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from benchmarks.soak.asks import MAX_MODEL_LEN

END = "</s>"
NUM_BYTES = 256
# Wide enough that no two tokens of a step are nearly as probable.
SPREAD = 0.25
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def save_model(folder: Path) -> None:
    """Windows and full attention, so that there are several cache groups."""
    config = Gemma3TextConfig(
        vocab_size=NUM_BYTES + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=None,
        eos_token_id=NUM_BYTES,
        pad_token_id=NUM_BYTES,
    )
    model = Gemma3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * SPREAD
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    model.save_pretrained(folder)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _byte_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer
