"""A server of the embedded model that takes chats, for clients as their users have them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jsonschema import Draft202012Validator

from tests.builders import demo_model_folder
from tests.cluster.stack import Server, serving

ROOT = Path(__file__).parents[1]
MODEL = "demo"
# A model that knows nothing of tools still calls them, where a grammar leaves it nothing else.
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "far": {"type": "boolean"}},
    "required": ["city", "far"],
    "additionalProperties": False,
}


@contextmanager
def demo_server(*options: str) -> Iterator[Server]:
    """Skips without the extra `demo`."""
    demo_model_folder()
    with serving(
        f"--model={MODEL}",
        "--launcher=local",
        "--dtype=float32",  # tokens are the same alone and beside other requests
        "--threads-per-rank=1",
        "--kv-memory=64MiB",
        f"--chat-template={ROOT / 'deploy' / 'gemma_chat.jinja'}",
        "--frontends=2",
        *options,
    ) as server:
        yield server


def check_place(value: object) -> None:
    Draft202012Validator(PLACE).validate(value)
