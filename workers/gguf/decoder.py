"""Decoders of any architecture, as transformers reads them from GGUF files.

Its reader says nothing of what it leaves out, so all that a file holds is accounted for here.
"""

import contextlib
import copy
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workers.errors import ModelError
from workers.gguf.configuration import FREQUENCIES, complete_configuration
from workers.gguf.file import GgufFile
from workers.gguf.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NAME = "model.gguf"
MAX_NAMED = 5
MAX_GROWTH = 2


def write_decoder(
    gguf: GgufFile, folder: Path, *, dtype: torch.dtype, on_message: Callable[[str], None]
) -> None:
    """Writes config.json, the tokenizer and safetensors files.

    Raises ModelError: transformers can't read the file, or leaves something of it out.
    """
    # Imported here: transformers takes 2 s, and a wrong file should be refused at once.
    import transformers

    with tempfile.TemporaryDirectory() as alone:
        # transformers would prefer a tokenizer or a configuration that lies beside the file.
        (Path(alone) / NAME).symlink_to(gguf.path.resolve())
        with _reading(gguf, "configuration"):
            config = transformers.AutoConfig.from_pretrained(alone, gguf_file=NAME)
            complete_configuration(config, gguf)
        with _reading(gguf, "tokenizer"):
            write_tokenizer(gguf, Path(alone) / NAME, folder)
        on_message("tokenizer written")
        with _reading(gguf, "weights"):
            _check_size(gguf, config)
            model = _load(gguf, Path(alone), config, dtype)
    _check_complete(gguf, model)
    _save(model, config, folder)


@contextlib.contextmanager
def _reading(gguf: GgufFile, part: str) -> Iterator[None]:
    """Somebody else's code reads somebody else's file here: anything may be raised."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        version = importlib.metadata.version("transformers")
        raise ModelError(
            f"{gguf.path}: transformers {version} can't read the {part}: "
            f"{type(error).__name__}: {reason}{_advice(gguf)}"
        ) from error


def _advice(gguf: GgufFile) -> str:
    """The architectures that can be read, where that of the file isn't among them."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    known = set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer"} | set(GGUF_CONFIG_ARCHS)
    architecture = gguf["general.architecture"]
    if any(name.replace("_", "") == architecture.replace("-", "") for name in known):
        return ""
    return f" (general.architecture={architecture!r} must be one of {', '.join(sorted(known))})"


def _check_size(gguf: GgufFile, config: "PreTrainedConfig") -> None:
    """Before memory is taken for what a damaged number asks for."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(copy.deepcopy(config))
    wanted = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(tensor.num_values for tensor in gguf.tensors.values())
    if wanted > MAX_GROWTH * stored:  # smaller differences are told by the tensors' names
        raise ModelError(
            f"{gguf.path}: by its metadata the model has {wanted} numbers, and the file holds "
            f"{stored}"
        )


def _load(
    gguf: GgufFile, folder: Path, config: "PreTrainedConfig", dtype: torch.dtype
) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM, GgufConfig

    auto: Any = AutoModelForCausalLM
    model, report = auto.from_pretrained(
        folder,
        gguf_file=NAME,
        config=copy.deepcopy(config),
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
        # Told by name below.
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"{gguf.path}: {name} has shape {list(found)} in the file, and {list(expected)} by its "
            "metadata"
        )
    # What is missing was made up by transformers.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{gguf.path}: no tensor of the file is {_some(missing)}")
    loaded: PreTrainedModel = model
    return loaded


def _check_complete(gguf: GgufFile, model: "PreTrainedModel") -> None:
    """Raises ModelError: the file holds more numbers than went into the model."""
    stored = sum(t.num_values for t in gguf.tensors.values() if t.name != FREQUENCIES)
    # Tied tensors are one in the file.
    taken = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    if stored != sum(taken.values()):
        raise ModelError(
            f"{gguf.path}: of {stored} numbers in the file, transformers' {type(model).__name__} "
            f"takes {sum(taken.values())}, so it would be another model{_left_out(gguf, model)}"
        )


def _left_out(gguf: GgufFile, model: "PreTrainedModel") -> str:
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    kind: Any = TENSOR_PROCESSORS.get(gguf["general.architecture"], TensorProcessor)
    known = get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    # Experts' tensors have no suffix in the map.
    unknown = [n for n in gguf.tensors if not {n, n.removesuffix(".weight")} & known.keys()]
    return f": it leaves out {_some(unknown)}" if unknown else ""


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _save(model: "PreTrainedModel", config: "PreTrainedConfig", folder: Path) -> None:
    """A model that was read from a GGUF file refuses to be saved, one with its tensors doesn't."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        plain = auto.from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
