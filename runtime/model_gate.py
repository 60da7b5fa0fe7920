"""Lets a model be served only where its class gives what transformers gives.

Classes that our tests compare pass. Of any other a small copy with random weights is tested first,
at TP 1 and at the wanted TP, in a helper process (`workers.gate`), and the verdict is kept.
"""

import hashlib
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.helper_process import run_helper
from runtime.model_conversion import cache_root

logger = logging.getLogger(__name__)

# Model types whose class `make check-full` compares with transformers at TP 1 and TP 2.
TESTED_TYPES = frozenset(
    {
        "cohere",
        "deepseek_v3",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_oss",
        "granite",
        "llama",
        "llama4_text",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
TIMEOUT_S = 180.0
# It runs on the CPU whatever the model will run on, and needs no network.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def check_model(model: str, folder: Path, *, tp: int, on_message: Callable[[str], None]) -> None:
    """Returns where the model in `folder` may be served on `tp` ranks.

    Raises ConfigError: it is refused; the message says why.
    """
    config = _read_config(folder)
    if _type_of(config) in TESTED_TYPES:
        return
    kept = cache_root() / "verdicts" / f"{_key(config, tp)}.json"
    verdict = _read_verdict(kept)
    if verdict is None:
        on_message(
            f"Testing a small copy of the model, since no test of ours knows its kind, "
            f"{_type_of(config)}; once, some seconds"
        )
        verdict = _judge(model, folder, tp)
        if verdict["is_certain"]:
            _keep(kept, verdict)
    if not verdict["accepted"]:
        raise ConfigError(f"model={model!r} isn't served: {verdict['reason']}")
    logger.info("%s was tested: a small copy gives what transformers gives", _type_of(config))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / 'config.json'} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.json'} must hold a JSON object")
    return config


def _type_of(config: dict[str, Any]) -> str:
    return str(config.get("model_type"))


def _key(config: dict[str, Any], tp: int) -> str:
    """Of everything that a verdict depends on: configuration, versions, our own code, TP."""
    digest = hashlib.sha256(json.dumps([config, tp], sort_keys=True).encode())
    for package in ("transformers", "torch"):
        digest.update(f"\0{package} {version(package)}".encode())
    spec = find_spec("workers")
    assert spec is not None
    assert spec.submodule_search_locations, "workers is a package"
    for source in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _read_verdict(path: Path) -> dict[str, Any] | None:
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("verdict %s can't be read, the model is tested again: %s", path, error)
        return None


def _parse(text: str) -> dict[str, Any]:
    """Raises ValueError: it is no verdict."""
    verdict = json.loads(text)
    kinds = {"accepted": bool, "reason": str, "is_certain": bool}
    if not isinstance(verdict, dict) or any(
        type(verdict.get(name)) is not kind for name, kind in kinds.items()
    ):
        raise ValueError(f"{text!r} is no verdict")
    return verdict


def _judge(model: str, folder: Path, tp: int) -> dict[str, Any]:
    """Raises ConfigError: the test came to no verdict."""
    # It may be killed in the middle: what it leaves lies in our folder.
    with tempfile.TemporaryDirectory(prefix="lockstep-gate-") as scratch:
        outcome = run_helper(
            "workers.gate",
            [str(folder), "--tp", str(tp)],
            on_line=lambda line: logger.debug("gate: %s", line),
            environment=ENVIRONMENT | {"TMPDIR": scratch},
            timeout_s=TIMEOUT_S,
        )
    if outcome.timed_out:
        raise ConfigError(
            f"model={model!r} isn't served: the test of a small copy took longer than "
            f"{TIMEOUT_S:.0f} s"
        )
    try:
        if outcome.code == 0 and outcome.lines:
            return _parse(outcome.lines[-1])
    except ValueError:
        pass  # what it said instead is told
    raise ConfigError(
        f"model={model!r} isn't served: the test of a small copy failed: {outcome.describe()}"
    )


def _keep(path: Path, verdict: dict[str, Any]) -> None:
    """A reader never sees half of it. Where it can't be kept, the next start tests again."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(verdict, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        logger.warning("the verdict on the model can't be kept in %s: %s", path.parent, error)
