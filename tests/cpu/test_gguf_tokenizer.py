"""Tokenizers from GGUF files give the tokens that the files say, or are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

pytest.importorskip("gguf", reason="the gguf extra isn't installed")
pytest.importorskip("accelerate", reason="the gguf extra isn't installed")

from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.gguf_files import (
    DECODER_KEYS,
    SENTENCEPIECES,
    VOCABULARY,
    byte_level_tokens,
    sentencepiece_tokens,
    train_byte_level,
    write_decoder,
)
from workers.errors import ModelError
from workers.gguf.endings import write_generation_config
from workers.gguf.file import open_gguf
from workers.gguf.tokenizer import write_tokenizer

pytestmark = pytest.mark.cpu

BEGIN, END, TURN_END = VOCABULARY - 4, VOCABULARY - 3, VOCABULARY - 2
TEXTS = [
    "the scheduler doesn't schedule 1234567 steps, does it?",
    " the  sequences\n\n\tsee\r\n   you ",
    "DON'T na\u00efve e\u0301 \u6771\u4eac \u0e44\u0e17\u0e22 \U0001f469\u200d\U0001f680",
    "<|im_end|>the<|tool|> <|begin|> steps<|end_of_text|>",
    "",
]


def convert_tokenizer(
    tmp_path: Path, tokens: Callable[[Any], None], *, arch: str = "llama"
) -> Tokenizer:
    """The converted tokenizer of a file without tensors, as frontends read it."""
    file = write_decoder(tmp_path / "model.gguf", arch, {}, DECODER_KEYS, tokens=tokens)
    folder = tmp_path / "out"
    folder.mkdir()
    gguf = open_gguf(file)
    write_tokenizer(gguf, file, folder)
    write_generation_config(gguf, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def byte_level(pre: str) -> Tokenizer:
    return train_byte_level(GGUF_PRE_TOKENIZER_SPLITS[pre])


@pytest.mark.parametrize(("arch", "pre"), [("llama", "llama-bpe"), ("qwen2", "qwen2")])
def test_a_byte_level_tokenizer_is_the_one_that_was_written(
    arch: str, pre: str, tmp_path: Path
) -> None:
    source = byte_level(pre)
    tokenizer = convert_tokenizer(tmp_path, byte_level_tokens(source, pre), arch=arch)
    for text in TEXTS:
        ids = source.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # transformers' class brings a token of its own, for which there is no embedding.
    assert tokenizer.get_vocab_size() == VOCABULARY


@pytest.mark.parametrize(
    ("arch", "pre", "told", "begins"),
    [
        ("llama", "llama-bpe", None, True),
        ("llama", "llama-bpe", False, False),
        ("qwen2", "qwen2", None, False),
        ("qwen2", "qwen2", True, True),
    ],
)
def test_a_text_begins_as_the_file_says(
    arch: str, pre: str, told: bool | None, begins: bool, tmp_path: Path
) -> None:
    def tokens(writer: Any) -> None:
        byte_level_tokens(byte_level(pre), pre)(writer)
        if told is not None:
            writer.add_add_bos_token(told)

    tokenizer = convert_tokenizer(tmp_path, tokens, arch=arch)
    assert (tokenizer.encode("the").ids[0] == BEGIN) == begins


@pytest.mark.parametrize(
    ("arch", "pre", "whole"), [("llama", "llama-bpe", 1), ("qwen2", "qwen2", 3)]
)
def test_llama3_takes_words_whole_that_no_merge_makes(
    arch: str, pre: str, whole: int, tmp_path: Path
) -> None:
    word = VOCABULARY - 5
    tokens = byte_level_tokens(byte_level(pre), pre, pieces={word: "qzx"})
    tokenizer = convert_tokenizer(tmp_path, tokens, arch=arch)
    assert len(tokenizer.encode("qzx", add_special_tokens=False).ids) == whole


def test_a_sentencepiece_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    tokenizer = convert_tokenizer(tmp_path, sentencepiece_tokens)
    ids = {piece: 259 + place for place, piece in enumerate(SENTENCEPIECES)}
    # BOS and a space come first; bytes stand for what the vocabulary hasn't.
    expected = [1, ids["\u2581ab"], ids["\u2581a"], ids["\u2581"], 3 + ord("c"), 2]
    assert tokenizer.encode("ab a c</s>").ids == expected
    assert tokenizer.decode(expected[:-1]) == "ab a c"
    # As in llama.cpp and Llama 2's own tokenizer, but not in the one that transformers builds.
    assert tokenizer.encode(" ab</s>a").ids == [
        1,
        ids["\u2581"],
        ids["\u2581ab"],
        2,
        ids["\u2581a"],
    ]


@pytest.mark.parametrize("pre", ["starcoder", "default", None])
def test_an_unknown_way_of_cutting_texts_is_refused(pre: str | None, tmp_path: Path) -> None:
    """Transformers falls back on GPT-2's, which gives other tokens."""
    tokens = byte_level_tokens(byte_level("qwen2"), pre)
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.pre={pre!r} must be one of .*qwen2"):
        convert_tokenizer(tmp_path, tokens, arch="qwen2")


def test_a_special_token_that_would_be_cut_is_refused(tmp_path: Path) -> None:
    """Transformers adds no special tokens that aren't written in the alphabet of bytes."""
    tokens = byte_level_tokens(
        byte_level("qwen2"), "qwen2", pieces={BEGIN + 3: "<\uff5cUser\uff5c>"}
    )
    with pytest.raises(ModelError, match=rf"token {BEGIN + 3}, '<\uff5cUser\uff5c>', would be cut"):
        convert_tokenizer(tmp_path, tokens, arch="qwen2")


def test_a_text_without_its_space_is_refused(tmp_path: Path) -> None:
    """Transformers doesn't read the key, and puts a space before each text."""

    def tokens(writer: Any) -> None:
        sentencepiece_tokens(writer)
        writer.add_add_space_prefix(False)

    with pytest.raises(ModelError, match=r"add_space_prefix=False, but transformers' tokenizer"):
        convert_tokenizer(tmp_path, tokens)


@pytest.mark.parametrize(("template", "ends"), [(None, END), ("{{ x }}", [END, TURN_END])])
def test_a_chats_turn_ends_a_text(template: str | None, ends: Any, tmp_path: Path) -> None:
    def tokens(writer: Any) -> None:
        byte_level_tokens(byte_level("qwen2"), "qwen2")(writer)
        if template is not None:
            writer.add_chat_template(template)

    convert_tokenizer(tmp_path, tokens, arch="qwen2")
    content = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert content == {"bos_token_id": BEGIN, "eos_token_id": ends}
    written = tmp_path / "out" / "chat_template.jinja"
    assert (written.read_text() if written.exists() else None) == template
