"""Which JSON schemas are taken: those whose every keyword is honoured.

llguidance refuses what it knows and hasn't built (`not`, `if`, `uniqueItems`, ...), but reads over
what it doesn't know. A misspelled `maxLenght` would constrain nothing, so it is refused here.
"""

import json
from collections.abc import Iterator
from typing import Any

from runtime.errors import InvalidRequestError

_ONE_SCHEMA = frozenset({"items", "additionalProperties"})
_LIST_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset(
    [
        "type",
        "enum",
        "const",
        "format",
        "pattern",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minItems",
        "maxItems",
        "required",
        "minProperties",
        "maxProperties",
        "$ref",
        "$id",
        "$schema",
        "$anchor",
    ]
)
# Say nothing about which values are valid.
_NOTES = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ]
)
# Not built in llguidance: its own message names them.
_LEFT_TO_LIBRARY = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
        "$dynamicAnchor",
    ]
)
_KNOWN = _ONE_SCHEMA | _LIST_OF_SCHEMAS | _NAMED_SCHEMAS | _VALUES | _NOTES | _LEFT_TO_LIBRARY


def read_json_schema(text: str) -> dict[str, Any]:
    """The schema as an object. Raises InvalidRequestError: no JSON schema, or not one we honour."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"json_schema={json.dumps(schema)[:40]} must be an object, such as {{}} for any value"
        )
    for path, part in _walk(schema):
        _check(path, part)
    return schema


def _walk(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in `root` with its place; with a stack, since it may be deep."""
    stack: list[tuple[str, Any]] = [("#", root)]
    while stack:
        path, schema = stack.pop()
        if not isinstance(schema, dict):
            continue  # true, false, or what llguidance will refuse
        yield path, schema
        for key, value in schema.items():
            place = f"{path}/{key}"
            if key in _ONE_SCHEMA:
                stack.append((place, value))
            elif key in _LIST_OF_SCHEMAS and isinstance(value, list):
                stack.extend((f"{place}/{index}", part) for index, part in enumerate(value))
            elif key in _NAMED_SCHEMAS and isinstance(value, dict):
                stack.extend((f"{place}/{name}", part) for name, part in value.items())


def _check(path: str, schema: dict[str, Any]) -> None:
    for key in schema:
        if key not in _KNOWN:
            raise InvalidRequestError(f"json_schema, {path}: keyword {key!r} isn't supported")
    if isinstance(schema.get("items"), list):
        raise InvalidRequestError(
            f"json_schema, {path}: a list of items isn't supported; use prefixItems"
        )
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(key), bool):
            raise InvalidRequestError(f"json_schema, {path}: {key} must be a number")
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    # Unnamed keys may come twice, and a parser keeps one of them.
    if isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
        raise InvalidRequestError(
            f"json_schema, {path}: minProperties={least} must be at most {len(required) + 1}, "
            f"one more than are required"
        )
