"""Which JSON schemas are taken: those whose every keyword is honoured.

llguidance refuses what it knows and hasn't built (`not`, `if`, `uniqueItems`, ...), but reads over
what it doesn't know. A misspelled `maxLenght` would constrain nothing, so it is refused here.

`$ref` is `#`, or points from there to a place that is a schema too, such as `#/$defs/name`.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from runtime.errors import InvalidRequestError
from runtime.grammar.json_strings import check_value, writable_pattern

Place = tuple[str, ...]  # the keys on the way from the root

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
    """The schema as an object, with its patterns written anew.

    Raises InvalidRequestError: no JSON schema, or not one we honour.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"json_schema={json.dumps(schema)[:40]} must be an object, such as {{}} for any value"
        )
    parts = dict(_walk(schema))
    for place, part in parts.items():
        if isinstance(part, dict):  # else true, false, or what llguidance will refuse
            path = "/".join(("#", *place))
            _check(path, part)
            _check_reference(path, part, parts)
            _settle_strings(path, part)
    return schema


def _walk(root: Any) -> Iterator[tuple[Place, Any]]:
    """Every schema in `root` with its place; with a stack, since it may be deep."""
    stack: list[tuple[Place, Any]] = [((), root)]
    while stack:
        place, schema = stack.pop()
        yield place, schema
        for key, value in schema.items() if isinstance(schema, dict) else ():
            here = (*place, key)
            if key in _ONE_SCHEMA:
                stack.append((here, value))
            elif key in _LIST_OF_SCHEMAS and isinstance(value, list):
                stack.extend(((*here, str(index)), part) for index, part in enumerate(value))
            elif key in _NAMED_SCHEMAS and isinstance(value, dict):
                stack.extend(((*here, name), part) for name, part in value.items())


def _check_reference(path: str, schema: dict[str, Any], parts: dict[Place, Any]) -> None:
    """What it points to must be among the checked parts."""
    if "$id" in schema and path != "#":
        raise InvalidRequestError(f"json_schema, {path}: $id isn't supported but at the root")
    if "$ref" in schema and _target(schema["$ref"]) not in parts:
        raise InvalidRequestError(
            f"json_schema, {path}: $ref={str(schema['$ref'])[:80]!r} must be # or point from there "
            f"to a schema, as #/$defs/name does"
        )


def _target(reference: Any) -> Place | None:
    """Of a JSON pointer in a fragment; None where it is something else."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    root, *steps = unquote(reference[1:]).split("/")
    return None if root else tuple(s.replace("~1", "/").replace("~0", "~") for s in steps)


def _settle_strings(path: str, schema: dict[str, Any]) -> None:
    """Patterns only match, and constants and names only have, what strings can have."""
    names = [schema.get("required"), [*_dict(schema, "properties")]]
    try:
        check_value([schema.get("const"), schema.get("enum"), *names])
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = writable_pattern(schema["pattern"])
        if patterns := _dict(schema, "patternProperties"):
            schema["patternProperties"] = {writable_pattern(p): patterns[p] for p in patterns}
    except InvalidRequestError as error:
        raise InvalidRequestError(f"json_schema, {path}: {error}") from error


def _dict(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Empty where llguidance will refuse what is there."""
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


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
