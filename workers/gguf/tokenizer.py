"""The tokenizer in a GGUF file, as transformers builds it, held against what the file says."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from workers.errors import ModelError
from workers.gguf.file import CONTROL, USER_DEFINED, GgufFile

# Ways of cutting texts into words that are GPT-2's, which transformers falls back on.
GPT2_SPLITS = {"gpt-2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "gigachat"}
# A word of the vocabulary is taken whole, whatever the merges say, and a text begins with BOS where
# the file says nothing of it. Files don't hold this: llama.cpp goes by the way of cutting, too.
LLAMA3_SPLITS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
}


def write_tokenizer(gguf: GgufFile, file: Path, folder: Path) -> None:
    """Writes the tokenizer's files and the chat template to `folder`; `file` is the GGUF file.

    Raises ModelError: it would give other tokens than the file says.
    """
    from transformers import AutoTokenizer

    whole_words = False
    options: dict[str, Any] = {}
    if gguf["tokenizer.ggml.model"] == "gpt2":
        split = gguf.metadata.get("tokenizer.ggml.pre")
        _check_split(gguf, split)
        whole_words = split in LLAMA3_SPLITS
        options["add_bos_token"] = whole_words
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **options)
    if whole_words:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    _put_space_first(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(folder)
    written = _drop_made_up_tokens(folder / "tokenizer.json", len(gguf["tokenizer.ggml.tokens"]))
    _check_vocabulary(gguf, written)
    _check_ends(gguf, written, whole_words)


def _put_space_first(tokenizer: Tokenizer) -> None:
    """Before every text, as llama.cpp does, also one that begins with a space."""
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.pre_tokenizer = None


def _check_split(gguf: GgufFile, split: str | None) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    known = sorted(GPT2_SPLITS | set(GGUF_PRE_TOKENIZER_SPLITS))
    if split not in known:
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.pre={split!r} must be one of those whose way of cutting "
            f"texts into words is known: {', '.join(known)}"
        )


def _drop_made_up_tokens(file: Path, num_tokens: int) -> Tokenizer:
    """Takes out the tokens that transformers adds by its class; the model has none such."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["id"] < num_tokens
    ]
    text = json.dumps(content, ensure_ascii=False)
    file.write_text(text, encoding="utf-8")
    return Tokenizer.from_str(text)


def _check_vocabulary(gguf: GgufFile, tokenizer: Tokenizer) -> None:
    pieces = gguf["tokenizer.ggml.tokens"]
    if tokenizer.get_vocab_size() > len(pieces):
        raise ModelError(
            f"{gguf.path}: the tokenizer has {tokenizer.get_vocab_size()} tokens, and the file "
            f"{len(pieces)}"
        )
    for token, kind in enumerate(gguf["tokenizer.ggml.token_type"].tolist()):
        if kind in (CONTROL, USER_DEFINED):
            ids = tokenizer.encode(pieces[token], add_special_tokens=False).ids
            if ids != [token]:
                raise ModelError(
                    f"{gguf.path}: token {token}, {pieces[token]!r}, would be cut into {ids}"
                )


def _check_ends(gguf: GgufFile, tokenizer: Tokenizer, add_bos: bool) -> None:
    """What is put before and after a text."""
    sentencepiece = gguf["tokenizer.ggml.model"] == "llama"
    plain = tokenizer.encode("a", add_special_tokens=False)
    expected = list(plain.ids)
    if gguf.metadata.get("tokenizer.ggml.add_bos_token", sentencepiece or add_bos):
        expected.insert(0, gguf["tokenizer.ggml.bos_token_id"])
    if gguf.metadata.get("tokenizer.ggml.add_eos_token", False):
        expected.append(gguf["tokenizer.ggml.eos_token_id"])
    if (found := tokenizer.encode("a").ids) != expected:
        raise ModelError(f"{gguf.path}: the text 'a' would be {found}, and must be {expected}")
    space = gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)
    if sentencepiece and plain.tokens[0].startswith("\u2581") != space:
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.add_space_prefix={space}, but transformers' tokenizer "
            f"gives {plain.tokens} for the text 'a'"
        )
