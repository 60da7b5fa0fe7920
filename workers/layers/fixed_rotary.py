"""Rotary embeddings whose frequencies transformers would choose by the longest sequence of a batch.

No request goes as far as they change (`models.config.max_model_len`), so that they never do; left
alone they read the largest position back from the device in every forward pass.
"""

import inspect
from functools import partial

from torch import nn


def fix_rotary(model: nn.Module) -> None:
    """Takes the choice out: what stays uses the frequencies that the module holds."""
    for module in model.modules():
        if _changes(getattr(module, "rope_type", None)):
            forward = inspect.unwrap(type(module).forward)
            module.__dict__["forward"] = partial(forward, module)


def _changes(rope_type: object) -> bool:
    """`rope_type` is a name or, by the type of layer, several."""
    names = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(
        isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in names
    )
