"""What a model's texts end with, and how its makers would sample: generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.gguf.configuration import decimal
from workers.gguf.file import GgufFile

ENDS = ("eos", "eot", "eom")
# A turn of a chat ends with one of these, which files often don't say; llama.cpp knows their names.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>")
SAMPLING: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def write_generation_config(gguf: GgufFile, folder: Path) -> None:
    """Raises ModelError: an id is none of the vocabulary."""
    content: dict[str, Any] = {}
    if (bos := _token_id(gguf, "bos")) is not None:
        content["bos_token_id"] = bos
    if ends := _ends(gguf):
        content["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if (pad := _token_id(gguf, "padding")) is not None:
        content["pad_token_id"] = pad
    for name, ours in SAMPLING.items():
        value = gguf.metadata.get(f"general.sampling.{name}")
        if value is not None:
            content[ours] = decimal(value) if isinstance(value, float) else value
            content["do_sample"] = True
    write_json(folder / "generation_config.json", content)


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _ends(gguf: GgufFile) -> list[int]:
    ids = [_token_id(gguf, name) for name in ENDS]
    if "tokenizer.chat_template" in gguf.metadata:
        pieces = gguf["tokenizer.ggml.tokens"]
        ids += [pieces.index(piece) for piece in TURN_ENDS if piece in pieces]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _token_id(gguf: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in gguf.metadata:
        return None
    gguf.token(key)
    token: int = gguf[key]
    return token
