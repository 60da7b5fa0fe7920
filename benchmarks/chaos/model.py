"""A tiny random Llama with a token for each byte, whose steps take milliseconds."""

from pathlib import Path

END = "<end>"
NUM_BYTES = 256
END_ID = NUM_BYTES
MAX_MODEL_LEN = 1280
SEED = 8


def write_model(folder: Path) -> None:
    """In float32; the same weights on each call."""
    # Here: the command's help needs neither.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=NUM_BYTES + 1,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) / 4
            # Norms stay near one; all else is random enough to matter.
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    model.save_pretrained(folder)
    _write_tokenizer(folder / "tokenizer.json")


def _write_tokenizer(path: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: token_id for token_id, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
