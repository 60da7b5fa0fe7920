"""From a configuration to the transformers module, without weights."""

import re
import threading
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from workers.errors import ModelError
from workers.layers.counted_positions import count_by_position_ids
from workers.layers.fixed_rotary import fix_rotary
from workers.layers.paged_attention import PagedAttention
from workers.models.config import TRANSFORMERS_ERRORS, find_model_class

# Parts of a configuration that belong to what isn't text.
FOREIGN = re.compile(r"vision|image|audio|speech|video|visual")
# Building patches torch for a while: of two threads one would restore the other's patches.
_building = threading.Lock()


def build_model(
    config: PreTrainedConfig, dtype: torch.dtype, attention: PagedAttention
) -> PreTrainedModel:
    """The module on the meta device, its attention `attention`, in evaluation mode.

    Parts for images and sound are left out. Raises ModelError: transformers can't build it.
    """
    try:
        with _building, torch.device("meta"), no_init_weights():
            model: PreTrainedModel = find_model_class(config)._from_config(
                config, dtype=dtype, attn_implementation=attention.name
            )
    except KeyError as error:
        if error.args != (attention.name,):
            raise _cannot_build(config, error) from error
        raise ModelError(
            f"model_type {config.model_type!r} has attention code of its own, which isn't served"
        ) from error
    except TRANSFORMERS_ERRORS as error:
        raise _cannot_build(config, error) from error
    for name in list(_foreign_parts(model)):
        model.set_submodule(name, _LeftOut(name))
    count_by_position_ids(model, attention.positions)
    fix_rotary(model)
    model.config.return_dict = True
    model.train(False).requires_grad_(False)
    _keep_in_float32(model, dtype)
    return model


def _cannot_build(config: PreTrainedConfig, error: Exception) -> ModelError:
    return ModelError(f"transformers can't build model_type {config.model_type!r}: {error}")


class _LeftOut(nn.Module):
    """Stands for a part that text doesn't need."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *_: object, **__: object) -> None:
        raise ModelError(f"{self.name} takes images or sound, which aren't served")


def left_out(model: PreTrainedModel) -> list[str]:
    """How the names of tensors begin that the model has no use for."""
    return [f"{name}." for name, module in model.named_modules() if isinstance(module, _LeftOut)]


def _foreign_parts(model: PreTrainedModel) -> Iterator[str]:
    """Names of the modules that take images or sound."""
    others = {kind for name, kind in model.config.sub_configs.items() if FOREIGN.search(name)}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and type(module.config) in others:
            yield name


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Widens what the class computes with in float32, such as the scores that pick experts."""
    parts = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        parts |= set(model._keep_in_fp32_modules or ())
    patterns = [re.compile(re.escape(part).replace(r"\*", ".*")) for part in parts]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()


def initialize_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Gives values to the buffers that no checkpoint holds, such as rotary frequencies.

    The parameters have theirs. Raises ModelError: a buffer is left without values.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    computed: list[tuple[str, torch.nn.Module, str]] = []
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                continue
            fresh = torch.empty_like(buffer, device="cpu")
            if fresh.is_floating_point():
                fresh.fill_(float("nan"))
            setattr(module, name, fresh)
            computed.append((f"{path}.{name}", module, name))
    with _building:
        model.initialize_weights()  # type: ignore[no-untyped-call]
    for path, module, name in computed:
        buffer = module.get_buffer(name)
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise ModelError(f"{type(model).__name__}: nothing gives values to buffer {path}")
        setattr(module, name, buffer.to(device))


def head_name(model: PreTrainedModel) -> str:
    """The name of the head's weight. Raises ModelError: there is no single head."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not hasattr(head, "weight"):
        raise ModelError(f"{type(model).__name__} has no single head over the vocabulary")
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)
