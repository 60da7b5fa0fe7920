"""JSON schemas that a request brings, as text: the order of their keys is that of the output."""

import json
from typing import Any

from runtime.errors import InvalidRequestError
from runtime.frontend.openai.body import describe

ANY_OBJECT = '{"type": "object"}'


def json_text(name: str, schema: object) -> str:
    """Raises InvalidRequestError: the field `name` is no JSON schema."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{name} is {describe(schema)}: must be a JSON schema, an object")
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"{name} has a number that JSON can't write") from error


def read_response_format(value: dict[str, Any] | None) -> str | None:
    """The JSON schema of the answer; None: any text.

    Raises InvalidRequestError, naming the field.
    """
    kind = "text" if value is None else value.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            assert value is not None
            return _read_json_schema(value.get("json_schema"))
        case _:
            raise InvalidRequestError(
                f"response_format.type={describe(kind)} must be 'text', 'json_object' or "
                "'json_schema'"
            )


def _read_json_schema(value: object) -> str:
    where = "response_format.json_schema"
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where} is {describe(value)}: must be an object with a schema")
    if value.get("schema") is None:
        raise InvalidRequestError(f"{where}.schema is missing: it must be a JSON schema")
    # `strict` may be either: the output always follows the schema.
    if isinstance(value["schema"], str):
        raise InvalidRequestError(f"{where}.schema is a text: must be an object")
    return json_text(f"{where}.schema", value["schema"])
