"""Finds the folder of the model that was asked for, and fetches or makes it where it must.

Files alone: reading them is the workers' business.
"""

from collections.abc import Callable
from pathlib import Path

from runtime.errors import ConfigError
from runtime.model_conversion import DEMO, demo_folder, gguf_folder

# Weights as safetensors, configuration, tokenizer; no pickles, no other frameworks' files.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken"]


def resolve_model(
    model: str,
    on_message: Callable[[str], None],
    *,
    download: Callable[[str], str] | None = None,
) -> str:
    """The folder that holds `model`: `demo`, the path of a folder or GGUF file, or a hub id.

    A model that isn't here yet takes a while: `on_message` gets a line for each stage.
    Raises ConfigError: there is no such model, its folder has no config.json, or its GGUF file
    can't be converted.
    """
    if model == DEMO:
        return str(demo_folder(on_message))
    folder = Path(model).expanduser()
    if folder.suffix.lower() == ".gguf" and not folder.is_dir():
        return str(gguf_folder(model, on_message))
    if _names_a_path(model) or folder.exists():
        return _check_folder(model, folder)
    on_message(f"Looking up {model} on the Hugging Face hub")
    return _check_folder(model, Path((download or _download)(model)))


def _names_a_path(model: str) -> bool:
    return model.startswith((".", "~", "/")) or model.count("/") > 1


def _check_folder(model: str, folder: Path) -> str:
    if not folder.exists():
        raise ConfigError(f"model={model!r}: there is no such folder")
    if not folder.is_dir():
        raise ConfigError(
            f"model={model!r} is a file: it must be a GGUF file, or a folder with config.json and "
            "safetensors files"
        )
    if not (folder / "config.json").is_file():
        files = sorted(path.name for path in folder.glob("*.gguf"))
        advice = f": give the path of its file {files[0]}" if files else ""
        raise ConfigError(
            f"model={model!r}: the folder {folder} has no config.json, so it holds no model "
            f"in Hugging Face's layout{advice}"
        )
    return str(folder.resolve())


def _download(model: str) -> str:
    # Imported here: a folder needs no hub, and the import takes half a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model={model!r}: there is no such folder, and the Hugging Face hub says: {reason}"
        ) from error
