"""Small tokenizers of every style, and their detokenization."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from runtime.frontend.text import REPLACEMENT, Detokenizer, Tokenizer
from tests.frontend import make_byte_fallback_tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "family 👩‍👩‍👧‍👦 and flag 🏳️‍🌈, thumbs 👍🏽 up",
    "สวัสดีชาวโลก ภาษาไทย",
    "مرحبا بالعالم، كيف الحال؟",
    "e\u0301 n\u0303 a\u0308\u0323 हिन्दी 한국어 日本語",
]
HARD_TEXTS = [*LINES, "  two  spaces\n\nlines\t", "กกกกกกกกกกกกกกกกกก", REPLACEMENT * 5 + "x"]
BOS, EOS = 0, 1


def byte_chars() -> dict[int, str]:
    """How byte-level tokenizers spell a byte: as itself where it is printable."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(moved)}


BYTE_CHARS = byte_chars()


def byte_level(lines: list[str], *, vocab_size: int) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return Tokenizer(tokenizer)


def straddling(text: str) -> Tokenizer:
    """Has a token for the end of the 3-byte character `text` and the start of the next one."""
    first, second, third = (BYTE_CHARS[byte] for byte in text.encode())
    vocab = {"<s>": BOS, "</s>": 1}
    for char in [*BYTE_CHARS.values(), third + first, third + first + second]:
        vocab[char] = len(vocab)
    merges = [(third, first), (third + first, second)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(tokenizer)


def sentencepiece(lines: list[str]) -> Tokenizer:
    """As Llama 2's: a space before the first word, which decoding takes away again."""
    tokenizer = make_byte_fallback_tokenizer([*lines, *"abcxyz"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(tokenizer)


def metaspace(lines: list[str]) -> Tokenizer:
    tokenizer = make_byte_fallback_tokenizer(lines)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    return Tokenizer(tokenizer)


TOKENIZERS = {
    "bytes": byte_level([], vocab_size=258),
    "byte-level": byte_level(LINES, vocab_size=400),
    "straddling": straddling("ก"),
    "sentencepiece": sentencepiece(LINES[:1]),
    "metaspace": metaspace(LINES[:1]),
    "gemma": Tokenizer(make_byte_fallback_tokenizer(LINES[:1])),
}


def stream(
    tokenizer: Tokenizer,
    prompt: list[int],
    pushes: list[list[int]],
    *,
    skip_special_tokens: bool = True,
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, pushes), detokenizer.finish()]


def continuation(
    tokenizer: Tokenizer,
    prompt: list[int],
    output: list[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """The output's text, found without any streaming."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
    after = tokenizer.decode(prompt + output, skip_special_tokens=skip_special_tokens)
    assert after.startswith(before)
    return after[len(before) :]


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, whatever the vocabulary would merge."""
    find = tokenizer._tokenizer.token_to_id
    if find("<0x00>") is not None:
        return [find(f"<0x{byte:02X}>") for byte in data]
    return [find(BYTE_CHARS[byte]) for byte in data]
