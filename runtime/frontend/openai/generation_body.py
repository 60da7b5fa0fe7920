"""The fields that completions and chats have in common."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema

from runtime.errors import InvalidRequestError
from runtime.frontend.openai.body import Body, Ids, TextOrTexts, Texts, describe
from runtime.frontend.openai.json_forms import json_text
from runtime.sampling_params import MAX_ENTRIES, MAX_SEED, SamplingParams

MIN_SEED = -(2**63)  # OpenAI's seeds have a sign
MAX_TOKEN_DIGITS = 10
ALL_TOKENS = -1  # how vLLM's clients write a top_k that keeps all
# Taken over as they are, where a request sets them.
_SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
    *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens"),
    *("prompt_logprobs", "regex", "grammar", "choices"),
)
_SCHEMA = WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]})
# Hints for the command line.
_HINT = re.compile(r"(, as ID=BIAS)?; may be given again")
_HELP = {each.name: _HINT.sub("", each.metadata["help"]) for each in fields(SamplingParams)}


def described(name: str) -> Any:
    """An unset field that says what the parameter of that name does."""
    return Field(default=None, description=_HELP[name])


class StreamOptions(Body):
    """What a stream tells beside the answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = Field(
        default=None, description="End with a chunk that has no choices and tells usage."
    )
    include_obfuscation: bool | None = Field(default=None, description="Ignored: no text hides.")


class GenerationBody(Body):
    """What is unset or null has the model's default."""

    model: str = Field(description="The name of the model that is served.")
    stream: bool | None = Field(default=None, description="Answer with events as tokens come.")
    stream_options: StreamOptions | None = None

    max_tokens: int | None = described("max_tokens")
    temperature: float | None = described("temperature")
    top_p: float | None = described("top_p")
    n: int | None = described("n")
    stop: TextOrTexts | None = described("stop")
    seed: int | None = described("seed")
    presence_penalty: float | None = described("presence_penalty")
    frequency_penalty: float | None = described("frequency_penalty")
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_ENTRIES["logit_bias"])] | None = (
        described("logit_bias")
    )

    # Beyond OpenAI's API.
    top_k: int | None = described("top_k")
    min_p: float | None = described("min_p")
    repetition_penalty: float | None = described("repetition_penalty")
    min_tokens: int | None = described("min_tokens")
    ignore_eos: bool | None = described("ignore_eos")
    stop_token_ids: Ids | None = described("stop_token_ids")
    include_stop_str_in_output: bool | None = described("include_stop_str_in_output")
    skip_special_tokens: bool | None = described("skip_special_tokens")
    allowed_token_ids: Ids | None = described("allowed_token_ids")
    bad_words: Texts | None = described("bad_words")
    prompt_logprobs: int | None = described("prompt_logprobs")
    json_schema: Annotated[Any, _SCHEMA] = described("json_schema")
    regex: str | None = described("regex")
    grammar: str | None = described("grammar")
    choices: Texts | None = described("choices")
    cache_salt: str | None = Field(
        default=None, description="Prefixes are shared with requests of the same salt alone."
    )
    priority: int | None = Field(default=None, description="Lower is more urgent.")
    request_id: str | None = Field(
        default=None, description="The client's label, as in the header X-Request-Id."
    )

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Raises InvalidRequestError: fields don't go with `stream`."""
        if not self.stream and self.stream_options is not None:
            raise InvalidRequestError("stream_options is set: only set it with stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                f"prompt_logprobs={self.prompt_logprobs} is set with stream=true: leave one out"
            )

    def sampling_values(self) -> dict[str, Any]:
        """Arguments for SamplingParams, without lengths and log probabilities.

        Raises InvalidRequestError: a seed or a token id is none.
        """
        values = self.model_dump(include=set(_SAMPLED), exclude_none=True)
        if self.top_k == ALL_TOKENS:
            values["top_k"] = 0
        if self.seed is not None:
            values["seed"] = _read_seed(self.seed)
        if self.logit_bias is not None:
            values["logit_bias"] = {
                _read_token(name): bias for name, bias in self.logit_bias.items()
            }
        if self.json_schema is not None:
            values["json_schema"] = json_text("json_schema", self.json_schema)
        return values


def set_structures(values: dict[str, Any]) -> Sequence[str]:
    """Names of the fields that say what form the output has."""
    return [name for name in ("json_schema", "regex", "grammar", "choices") if name in values]


def _read_seed(seed: int) -> int:
    if seed < MIN_SEED:
        raise InvalidRequestError(f"seed={describe(seed)} must be in [-2**63, 2**64)")
    return seed & MAX_SEED if seed < 0 else seed


def _read_token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= MAX_TOKEN_DIGITS):
        raise InvalidRequestError(
            f"logit_bias has the key {describe(name)}: must be a token id in decimal digits"
        )
    return int(name)
