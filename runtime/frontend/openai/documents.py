"""What the OpenAPI document says of bodies, answers and errors."""

from collections.abc import Mapping
from typing import Any

from runtime.frontend.openai import answers
from runtime.frontend.openai.body import Body
from runtime.frontend.openai.errors import ErrorBody

MODEL_PARAMETER = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}
MESSAGES = [{"role": "user", "content": "Hello"}]
_ERRORS = {
    400: "A field is wrong: the message names it, its value and its limit.",
    401: "The key is none that this server knows.",
    404: "There is no such model or address.",
    405: "The address takes other methods.",
    408: "The request came too slowly, or can't be answered in its time.",
    413: "The body is too large.",
    429: "There is no room now; Retry-After says when to try again.",
    500: "The model or the server failed.",
    503: "No engine is there, or the server is stopping; Retry-After says when to try again.",
}
_EVENTS = "Events, each with a chunk as JSON; the last one is [DONE]. With stream=true."


def request_body(kind: type[Body], example: Mapping[str, Any]) -> dict[str, Any]:
    """For a route's `openapi_extra`: FastAPI doesn't read the body."""
    schema = kind.model_json_schema()
    content = {"schema": _inline(schema, schema.pop("$defs", {})), "example": dict(example)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def responses(answer: Any, *, chunk: Any = None, errors: bool = True) -> dict[int | str, Any]:
    """For a route's `responses`: its answer, chunks of it, and errors."""
    good: dict[str, Any] = {"model": answer, "description": "The answer."}
    if chunk is not None:
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
        good["description"] = f"The answer. {_EVENTS}"
    found: dict[int | str, Any] = {200: good}
    for status, description in _ERRORS.items() if errors else ():
        found[status] = {"model": ErrorBody, "description": description}
    return found


def completion_responses() -> dict[int | str, Any]:
    return responses(answers.Completion, chunk=answers.Completion)


def chat_responses() -> dict[int | str, Any]:
    return responses(answers.ChatCompletion, chunk=answers.ChatChunk)


def _inline(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema without references, which would point to another document."""
    if isinstance(schema, list):
        return [_inline(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _inline(definitions[name], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}
