"""What a client asks of /v1/completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from runtime.errors import InvalidRequestError
from runtime.frontend.openai.body import describe
from runtime.frontend.openai.generation_body import GenerationBody
from runtime.frontend.prompts import PromptReader
from runtime.request import ModelInfo
from runtime.sampling_params import SamplingParams

# Of all prompts together: each choice is a sequence of its own. More at once would hold up other
# requests, also where their client leaves.
MAX_ALL_CHOICES = 256
MAX_PROMPTS = MAX_ALL_CHOICES

_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = WithJsonSchema(
    {
        "anyOf": [
            _TEXT,
            {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT},
            _IDS,
            {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS},
        ],
        "description": "A text, token ids, or a list of one of them.",
    }
)


class CompletionBody(GenerationBody):
    """A prompt, or several, to go on with."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"suffix": ("",)}

    prompt: Annotated[Any, _PROMPT]
    echo: bool | None = Field(default=None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(
        default=None,
        description="Tell the log probability of each token, and of so many most probable ones.",
    )
    best_of: int | None = Field(default=None, description="Must be n: all choices are told.")

    @property
    def is_scoring(self) -> bool:
        """Nothing is to be generated: the client wants the prompt back, and what it scores."""
        return self.max_tokens == 0 and bool(self.echo)

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError: a field is out of range, or doesn't go with another."""
        self.check_stream()
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise InvalidRequestError(f"best_of={describe(self.best_of)} must be n={n}, or unset")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens=0 must be at least 1, unless echo=true")
        values = self.sampling_values()
        values["logprobs"] = self.logprobs
        # The engine always makes a token, which isn't told.
        values["max_tokens"] = 1 if self.is_scoring else self.max_tokens
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            values["prompt_logprobs"] = self.logprobs
        return SamplingParams(**values)


Prompt = str | list[int]


def read_prompts(value: object) -> list[Prompt]:
    """The prompts that a field `prompt` has; how long they are isn't looked at.

    Raises InvalidRequestError: it is empty, or no prompt.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        _check_prompt("prompt", value)
        return [value]
    if not isinstance(value, list):
        raise InvalidRequestError(
            f"prompt is {describe(value)}: must be a text, token ids, or a list of one of them"
        )
    if not value:
        raise InvalidRequestError("prompt is an empty list: it must have at least 1 entry")
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt has {len(value)} entries: must be at most {MAX_PROMPTS}")
    for place, each in enumerate(value):
        _check_prompt(f"prompt[{place}]", each)
        if type(each) is not type(value[0]):
            raise InvalidRequestError(
                f"prompt[{place}] is {describe(each)}: must be as prompt[0], which is "
                f"{describe(value[0])}"
            )
    return value


def check_choices(num_prompts: int, n: int) -> None:
    """Raises InvalidRequestError: all prompts together have too many."""
    if num_prompts * n > MAX_ALL_CHOICES:
        raise InvalidRequestError(
            f"n={n} choices for each of {num_prompts} prompts are {num_prompts * n}: must be at "
            f"most {MAX_ALL_CHOICES} together"
        )


def check_ids(prompts: Sequence[Prompt], reader: PromptReader, model: ModelInfo) -> None:
    """Raises InvalidRequestError: a prompt of ids is too long, or has an id that is none."""
    for each in prompts:
        if not isinstance(each, str):
            _check_ids(each, reader, model)


async def encode_prompts(prompts: Sequence[Prompt], reader: PromptReader) -> list[list[int]]:
    """Raises InvalidRequestError: one is too long, or no text."""
    return [await reader.read_text(each) if isinstance(each, str) else each for each in prompts]


def _check_ids(token_ids: list[int], reader: PromptReader, model: ModelInfo) -> None:
    reader.read_ids(token_ids)  # first: what is too long isn't looked at
    for place, each in enumerate(token_ids):
        if not _is_id(each):
            raise InvalidRequestError(
                f"prompt has {describe(each)} at place {place}: must be a token id"
            )
        if not 0 <= each < model.vocab_size:
            raise InvalidRequestError(
                f"prompt token id {describe(each)} must be in [0, {model.vocab_size}), the "
                "vocabulary"
            )


def _check_prompt(name: str, value: object) -> None:
    if not isinstance(value, str | list):
        raise InvalidRequestError(f"{name} is {describe(value)}: must be a text or token ids")
    if not value:
        what, unit = ("text", "character") if isinstance(value, str) else ("list", "token")
        raise InvalidRequestError(f"{name} is an empty {what}: it must have at least 1 {unit}")


def _is_id(value: object) -> bool:
    return type(value) is int
