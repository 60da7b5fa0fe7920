"""JSON bodies: read strictly, with refusals that name field, value and limit."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from runtime.errors import InvalidRequestError

MAX_SHOWN_CHARACTERS = 80
# Of lists and objects, and in texts. A thread is of no help: while JSON is read no other runs, and
# lists and objects take most of that time.
MAX_BRACKETS = 1 << 17
# Fields of OpenAI's API, and of servers like this one, that change nothing in an output.
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
# How other servers call what has another name here.
OTHER_NAMES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choices",
    "structured_outputs": "json_schema, regex, grammar or choices",
    "include_stop_str": "include_stop_str_in_output",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "truncate_prompt_tokens": "a shorter prompt",
}

_KINDS = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}

_Body = TypeVar("_Body", bound="Body")


def _in_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# Wrong entries of a list are told one by one: the first is enough.
Texts = Annotated[list[str], Field(fail_fast=True)]
TextOrTexts = Annotated[Texts, BeforeValidator(_in_list, json_schema_input_type=str | list[str])]
Ids = Annotated[list[int], Field(fail_fast=True)]
Object = dict[str, Any]
Objects = Annotated[list[Object], Field(fail_fast=True)]


class Body(BaseModel):
    """Fields as they come: an integer is a number, but neither is a text or a truth value."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    # Fields that would change the output, which can't be done, by what changes nothing.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @classmethod
    def names(cls) -> frozenset[str]:
        """Of all fields that have a meaning here, were it to be refused."""
        return frozenset((*cls.model_fields, *cls.neutral))


def read_body(kind: type[_Body], content: bytes) -> _Body:
    """Raises InvalidRequestError: it is no JSON object with the fields of `kind`."""
    num_brackets = content.count(b"{") + content.count(b"[")
    if num_brackets > MAX_BRACKETS:
        raise InvalidRequestError(
            f"the body has {num_brackets} opening brackets: must be at most {MAX_BRACKETS}"
        )
    try:
        value = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body is {describe(value)}: must be a JSON object")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise InvalidRequestError(_explain(first)) from error
    _check_unknown(body)
    return body


def describe(value: object) -> str:
    """A value for a message, shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"a list of {len(value)} entries"
        case dict():
            return f"an object of {len(value)} entries"
        case int() if abs(value) >= 10**MAX_SHOWN_CHARACTERS:
            return "a huge number"
        case str() if len(value) > MAX_SHOWN_CHARACTERS:
            return f"{value[:MAX_SHOWN_CHARACTERS]!r}..."
        case _:
            return repr(value)


def path_of(location: tuple[int | str, ...]) -> str:
    """As our messages write it: messages[2].content."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _explain(error: ErrorDetails) -> str:
    path = path_of(error["loc"])
    message = error["msg"]
    if error["type"] == "missing":
        return f"{path} is missing: the request must have it"
    if error["type"] == "extra_forbidden":
        return f"{path} isn't known here: leave it out"
    if error["type"] in _KINDS:
        return f"{path}={describe(error['input'])} must be {_KINDS[error['type']]}"
    return f"{path}={describe(error['input'])}: {message[:1].lower()}{message[1:]}"


def _check_unknown(body: Body) -> None:
    """Raises InvalidRequestError: it has a field that would be ignored, though it matters."""
    for name, value in (body.model_extra or {}).items():
        if name in HARMLESS:
            continue
        shown = name[:MAX_SHOWN_CHARACTERS]
        if name in OTHER_NAMES:
            raise InvalidRequestError(f"{shown} isn't known here: use {OTHER_NAMES[name]}")
        if name not in body.neutral:
            raise InvalidRequestError(f"{shown} isn't known here: leave it out")
        if value is not None and value not in body.neutral[name]:
            raise InvalidRequestError(f"{shown}={describe(value)} can't be served: leave it out")
