"""Finds the folder of the model that was asked for, and fetches or makes it where it must.

Files alone: reading them is the workers' business.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from runtime.errors import ConfigError
from runtime.model_conversion import DEMO, demo_folder, gguf_folder, local_path

logger = logging.getLogger(__name__)

# Configuration and tokenizer, then weights; no pickles, no other frameworks' files.
SMALL_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken")
WEIGHTS = ".safetensors"
PICKLES = (".bin", ".pt", ".pth")
MAX_SHOWN = 100  # characters of a model's name in a message

OnMessage = Callable[[str], None]


class Hub(Protocol):
    """Where models with an id are kept. Whatever it raises is a failure of its own."""

    def list_files(self, model: str) -> list[str] | None:
        """Names of all files of the newest revision; None where the hub can't be reached."""

    def download(self, model: str, patterns: Sequence[str], revision: str | None) -> str:
        """The folder of a revision, by default the newest, named like it; the rest of it stays."""


class HuggingFaceHub:
    """Through its own library, which is imported late: it takes half a second."""

    def list_files(self, model: str) -> list[str] | None:
        """Also None where it answers with an error: the download, which comes next, tells it."""
        from huggingface_hub import list_repo_files

        try:
            return list(list_repo_files(model))
        except Exception as error:  # of several libraries; its cache may have the model
            logger.info("the files of %s can't be listed: %s", model, error)
            return None

    def download(self, model: str, patterns: Sequence[str], revision: str | None) -> str:
        """Of models in its cache no more than that, where the hub can't be reached."""
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model, allow_patterns=list(patterns), revision=revision))


HUB = HuggingFaceHub()


def resolve_model(model: str, on_message: OnMessage, *, hub: Hub = HUB) -> str:
    """The folder that holds `model`: `demo`, the path of a folder or GGUF file, or a hub id.

    Of a hub id it has all but the weights, which `fetch_weights` adds: first the rest should be
    looked at. What isn't here yet takes a while: `on_message` gets a line for each stage.
    Raises ConfigError: there is no such model, its folder has no config.json, the hub has no
    safetensors of it, or its GGUF file can't be converted.
    """
    if model == DEMO:
        return str(demo_folder(on_message))
    path = local_path(model)
    is_there = _is_there(model, path)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return str(gguf_folder(model, on_message))
    if _names_a_path(model) or is_there:
        return _check_folder(model, path)
    on_message(f"Looking up {model} on the Hugging Face hub")
    if (files := hub.list_files(model)) is not None:
        _check_listing(model, files)
    return _check_folder(model, Path(_download(model, hub, SMALL_PATTERNS, revision=None)))


def fetch_weights(model: str, folder: str, on_message: OnMessage, *, hub: Hub = HUB) -> None:
    """Adds the weights to `folder`, what `resolve_model` gave for `model`, if that is a hub id.

    Raises ConfigError: they can't be fetched.
    """
    path = Path(folder)
    if model == DEMO or _names_a_path(model) or _is_there(model, local_path(model)):
        return
    on_message(f"Fetching the weights of {model}, unless they are here already")
    # The same revision, whatever was published since.
    _download(model, hub, (*SMALL_PATTERNS, f"*{WEIGHTS}"), revision=path.name)
    if next(path.glob(f"*{WEIGHTS}"), None) is None:
        raise ConfigError(
            f"model={model!r}: no *{WEIGHTS} file came from the Hugging Face hub to {folder}"
        )


def _names_a_path(model: str) -> bool:
    return model.startswith((".", "~", "/")) or model.count("/") > 1


def _is_there(model: str, path: Path) -> bool:
    """Raises ConfigError: that can't be known."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        shown = model if len(model) <= MAX_SHOWN else f"{model[:MAX_SHOWN]}..."
        raise ConfigError(f"model={shown!r} can't be looked up: {error.strerror}") from error
    return True


def _check_folder(model: str, folder: Path) -> str:
    if not _is_there(model, folder):
        raise ConfigError(f"model={model!r}: there is no such folder")
    if not folder.is_dir():
        raise ConfigError(
            f"model={model!r} is a file: it must be a GGUF file, or a folder with config.json and "
            "safetensors files"
        )
    if not _is_there(model, folder / "config.json"):
        files = sorted(path.name for path in folder.glob("*.gguf"))
        advice = ""
        if files:
            which = "its file" if len(files) == 1 else "one of its files, such as"
            advice = f": give the path of {which} {files[0]}"
        raise ConfigError(
            f"model={model!r}: the folder {folder} has no config.json, so it holds no model "
            f"in Hugging Face's layout{advice}"
        )
    return str(folder.resolve())


def _check_listing(model: str, files: Sequence[str]) -> None:
    """Raises ConfigError: no download would give a model that can be served."""
    if "config.json" not in files:
        has_gguf = any(name.lower().endswith(".gguf") for name in files)
        advice = ": download one of its GGUF files, and give the path of that" if has_gguf else ""
        raise ConfigError(
            f"model={model!r}: the repository has no config.json, so it holds no model in Hugging "
            f"Face's layout{advice}"
        )
    if any(name.endswith(WEIGHTS) and "/" not in name for name in files):
        return
    advice = ""
    pickles = sorted(name for name in files if name.endswith(PICKLES))
    if pickles:
        shown = next((name for name in pickles if name.startswith("pytorch_model")), pickles[0])
        advice = (
            f", only {shown} and the like, which may run code when it is read: if you trust "
            'it, convert it by python -c "from transformers import AutoModelForCausalLM as M, '
            f"AutoTokenizer as T; [C.from_pretrained('{model}').save_pretrained('FOLDER') "
            'for C in (M, T)]" and give the path of FOLDER'
        )
    raise ConfigError(f"model={model!r}: the repository has no *{WEIGHTS} file{advice}")


def _download(model: str, hub: Hub, patterns: Sequence[str], *, revision: str | None) -> str:
    try:
        return hub.download(model, patterns, revision)
    except Exception as error:  # of several libraries: network, disk, hub
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        which = "" if revision else "there is no such folder, and "
        raise ConfigError(f"model={model!r}: {which}the Hugging Face hub says: {reason}") from error
