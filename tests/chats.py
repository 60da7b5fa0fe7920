"""For tests of chats: templates in folders, and renderings without an event loop of the test's."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.frontend.chat import ChatTemplate

TIMEOUT_S = 30.0
MAX_BYTES = 1 << 20
DATA = Path(__file__).parent / "data"
GEMMA_TEMPLATE = Path(__file__).parent.parent / "deploy" / "gemma_chat.jinja"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def user(content: object = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: object = "hello") -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def write_folder(folder: Path, template: object = None, **entries: object) -> Path:
    """A model's folder with a tokenizer_config.json."""
    config = SPECIAL_TOKENS | entries
    if template is not None:
        config["chat_template"] = template
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def chat_template(source: str, *, max_bytes: int = MAX_BYTES) -> Iterator[ChatTemplate]:
    template = ChatTemplate({"default": source}, SPECIAL_TOKENS, max_bytes=max_bytes)
    try:
        yield template
    finally:
        template.close()


def render(
    template: ChatTemplate,
    messages: Sequence[object] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> str:
    messages = [user()] if messages is None else messages
    return asyncio.run(template.render(messages, timeout_s=timeout_s, **options))


def render_once(source: str, messages: Sequence[object] | None = None, **options: Any) -> str:
    with chat_template(source) as template:
        return render(template, messages, **options)
