"""The language model's tensors within a checkpoint that also has parts for images or sound."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeVar

PART = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
HEAD = "lm_head."

Stored = TypeVar("Stored")


def text_tensors(stored: Mapping[str, Stored], names: Collection[str]) -> dict[str, Stored]:
    """Those tensors under the names that the language model alone would have.

    `names` are the tensors of the model that is served. A checkpoint that has no such parts, or a
    model that has them too, is left alone.
    """
    is_whole = any(name in names and not name.startswith(HEAD) for name in stored)
    if is_whole or not any(map(PART.match, stored)) or any(map(PART.match, names)):
        return dict(stored)
    # What all but the head begins with.
    firsts = Counter(name.partition(".")[0] for name in names if not name.startswith(HEAD))
    ((prefix, _),) = firsts.most_common(1)
    found: dict[str, Stored] = {}
    for name, tensor in stored.items():
        own = PART.sub("", name)
        if own.startswith(HEAD):
            found[own] = tensor
        elif own != name:
            found[f"{prefix}.{own}"] = tensor
    return found
