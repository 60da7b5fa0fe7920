"""Holds a file's metadata against the kinds of values that its readers take for granted.

A damaged or hostile file is refused here, before somebody else's code sees it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from workers.errors import ModelError
from workers.gguf.file import GgufFile

TEXT, NUMBER, TRUTH = "a text", "a number", "true or false"
COUNT, SIZE = "a whole number", "a whole number of at least 1"
TEXTS, NUMBERS = "an array of texts", "an array of numbers"
# As `workers.gguf.file` reads them: arrays of numbers are numpy's, those of texts lists.
IS: Mapping[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str),
    NUMBER: lambda value: type(value) in (int, float),
    TRUTH: lambda value: isinstance(value, bool),
    COUNT: lambda value: type(value) is int,
    SIZE: lambda value: type(value) is int and value >= 1,
    TEXTS: lambda value: isinstance(value, list),
    NUMBERS: lambda value: isinstance(value, np.ndarray),
}

# What a key must be, the first pattern that matches all of it.
KINDS: Mapping[str, str] = {
    r"general\.(architecture|name)": TEXT,
    r"general\.sampling\.(temp|top_p|min_p|penalty_repeat)": NUMBER,
    r"general\.(alignment|sampling\.top_k)|split\.count": COUNT,
    r"tokenizer\.ggml\.(model|pre)|tokenizer\.chat_template": TEXT,
    r"tokenizer\.ggml\.(tokens|merges)": TEXTS,
    r"tokenizer\.ggml\.(token_type|scores)": NUMBERS,
    r"tokenizer\.ggml\.add_\w+": TRUTH,
    r"tokenizer\.ggml\.\w+_token_id": COUNT,
}
# The same for keys behind the architecture's name. Others have no place in a configuration, or are
# refused with their values.
MODEL_KINDS: Mapping[str, str] = {
    r"(block_count|context_length|embedding_length|vocab_size|rope\.dimension_count)": SIZE,
    r"rope\.scaling\.type": TEXT,
    r"rope\.(freq_base|freq_base_swa|scaling\.(factor|original_context_length|yarn_\w+))": NUMBER,
}
# These may differ by layer: one number, or an array of them.
PER_LAYER = re.compile(
    r"feed_forward_length|expert_\w+|attn_logit_softcapping|final_logit_softcapping"
    r"|attention\.(head_count|head_count_kv|key_length|value_length|layer_norm_\w+)"
    r"|attention\.sliding_window(_pattern)?"
)
BLOCK = re.compile(r"\bblk\.(\d+)\.")
MAX_SHOWN = 60  # characters of a value in a message


def check_metadata(gguf: GgufFile) -> None:
    """Raises ModelError: a value is of a wrong kind, or there are other blocks than are told."""
    architecture = _checked(gguf, "general.architecture", gguf["general.architecture"], TEXT)
    for key, value in gguf.metadata.items():
        name = key.removeprefix(f"{architecture}.")
        kinds = KINDS if name == key else MODEL_KINDS
        kind = next((kind for form, kind in kinds.items() if re.fullmatch(form, name)), None)
        if kind is not None:
            _checked(gguf, key, value, kind)
        elif name != key and PER_LAYER.fullmatch(name) and not IS[NUMBERS](value):
            _checked(gguf, key, value, NUMBER)
    _check_blocks(gguf, f"{architecture}.block_count")
    pieces, types = (
        gguf.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type")
    )
    if pieces is not None and types is not None and len(pieces) != len(types):
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.token_type has {len(types)} entries, and must have "
            f"{len(pieces)}, as many as there are tokens"
        )


def _check_blocks(gguf: GgufFile, key: str) -> None:
    """Others beyond those that are told have names of their own in later errors."""
    found = {match[1] for name in gguf.tensors if (match := BLOCK.search(name))}
    if gguf.tensors and gguf[key] > len(found):
        raise ModelError(
            f"{gguf.path}: {key}={gguf[key]} must be {len(found)}, the number of blocks whose "
            "tensors the file holds"
        )


def _checked(gguf: GgufFile, key: str, value: Any, kind: str) -> Any:
    if not IS[kind](value):
        shown = repr(value.tolist() if isinstance(value, np.ndarray) else value)
        if len(shown) > MAX_SHOWN:
            shown = f"{shown[:MAX_SHOWN]}..."
        raise ModelError(f"{gguf.path}: {key}={shown} must be {kind}")
    return value
