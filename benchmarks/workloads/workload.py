"""A workload, and the file that it is kept in."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import click

FIRST_ID = 1000  # prompts have no ids below it, where special tokens are
LAST_IDS = 1000  # nor so many at the vocabulary's end
MEMBERS = {
    "name": str,
    "model": str,
    "vocab_size": int,
    "seed": int,
    "prefix_caching": bool,
    "requests": list,
}


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """Greedy, past any end token: exactly `output_len` tokens come of it."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are all there from the beginning."""

    name: str
    model: str
    vocab_size: int
    seed: int
    prefix_caching: bool
    requests: tuple[WorkloadRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(each.prompt) for each in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(each.output_len for each in self.requests)

    @property
    def max_len(self) -> int:
        """Of prompt and output together."""
        return max(len(each.prompt) + each.output_len for each in self.requests)

    def shifted(self, distance: int) -> "Workload":
        """The same shape with other token ids, so that nothing cached of another run fits.

        Beginnings that prompts share they share still. Ids stay in [1000, vocab_size - 1000), or
        in the whole vocabulary where it is smaller than that.
        """
        low, count = id_range(self.vocab_size)

        def moved(prompt: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(low + (token - low + distance) % count for token in prompt)

        requests = tuple(
            WorkloadRequest(moved(each.prompt), each.output_len) for each in self.requests
        )
        return replace(self, requests=requests)

    def first_tokens(self) -> "Workload":
        """The same prompts with one token of output each."""
        requests = tuple(WorkloadRequest(each.prompt, 1) for each in self.requests)
        return replace(self, requests=requests)

    def digest(self) -> str:
        """sha256 of the token ids and lengths alone: of what is computed, whatever its name."""
        content = [[list(each.prompt), each.output_len] for each in self.requests]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "model": self.model,
            "vocab_size": self.vocab_size,
            "seed": self.seed,
            "prefix_caching": self.prefix_caching,
            "requests": [
                {"prompt": list(each.prompt), "output_len": each.output_len}
                for each in self.requests
            ],
        }


def id_range(vocab_size: int) -> tuple[int, int]:
    """The lowest id of prompts, and how many there are from it on."""
    if vocab_size <= FIRST_ID + LAST_IDS:
        return 0, vocab_size
    return FIRST_ID, vocab_size - FIRST_ID - LAST_IDS


def save_workload(workload: Workload, path: Path) -> None:
    path.write_text(json.dumps(workload.to_json()), encoding="utf-8")


def load_workload(path: Path) -> Workload:
    """Raises ClickException, which names file and field: it is no workload."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise click.ClickException(f"{path} can't be read as JSON: {error}") from error
    try:
        return _read(document)
    except ValueError as error:
        raise click.ClickException(f"{path} is no workload: {error}") from error


def _read(document: object) -> Workload:
    if not isinstance(document, dict):
        raise ValueError(f"it is a {type(document).__name__}, not an object")
    for name, kind in MEMBERS.items():
        if name not in document:
            raise ValueError(f"{name} is missing")
        # A bool is an int to Python.
        if type(document[name]) is not kind:
            raise ValueError(
                f"{name} must be of type {kind.__name__}, not {type(document[name]).__name__}"
            )
    if document["vocab_size"] < 1:
        raise ValueError(f"vocab_size={document['vocab_size']} must be at least 1")
    if not document["requests"]:
        raise ValueError("requests is empty")
    requests = tuple(
        _read_request(place, each, document["vocab_size"])
        for place, each in enumerate(document["requests"])
    )
    rest = {name: document[name] for name in MEMBERS if name != "requests"}
    return Workload(**rest, requests=requests)


def _read_request(place: int, value: object, vocab_size: int) -> WorkloadRequest:
    where = f"requests[{place}]"
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {type(value).__name__}")
    prompt, output_len = value.get("prompt"), value.get("output_len")
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where}.prompt must be a list of at least one token id")
    for index, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{where}.prompt[{index}]={token!r} must be in [0, vocab_size={vocab_size})"
            )
    if type(output_len) is not int or output_len < 1:
        raise ValueError(f"{where}.output_len={output_len!r} must be a number of at least 1")
    return WorkloadRequest(tuple(prompt), output_len)
