"""A JSON schema that leaves a model nothing to write but calls of tools."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequestError
from runtime.grammar.json_schema import read_json_schema
from runtime.sampling_params import MAX_STRUCTURE_BYTES

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_SAYS_NOTHING = frozenset({"type", "properties", "required", "title", "description"})
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties"})
# What a schema says of itself as a document, which it no longer is.
_OF_DOCUMENTS = ("$schema", "$id")
# Values in a schema that are none themselves.
_DATA = frozenset({"const", "enum", "default", "examples"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def call_schema(tools: Sequence[Mapping[str, Any]], *, name: str | None, parallel: bool) -> str:
    """JSON schema of a call: {"name": ..., "arguments": ...}; of a list of calls if `parallel`.

    `tools` are as clients of chat APIs know them, `name` is the function that must be called.
    Raises InvalidRequestError, naming the field: no such tool, or its parameters can't be forced.
    """
    functions = [_function(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    wanted = [
        (place, function)
        for place, function in enumerate(functions)
        if name is None or function["name"] == name
    ]
    if not wanted:
        which = "tools is empty" if name is None else f"tool_choice names {name[:80]!r}"
        known = ", ".join(str(function["name"]) for function in functions)[:200] or "none"
        raise InvalidRequestError(f"{which}: it must be a function of tools, which has {known}")
    _check_size(wanted)
    root = ("items",) if parallel else ()
    calls = [
        _call(
            f"tools[{place}].function.parameters",
            function,
            root if len(wanted) == 1 else (*root, "anyOf", str(index)),
        )
        for index, (place, function) in enumerate(wanted)
    ]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": call, "minItems": 1} if parallel else call
    return json.dumps(schema, ensure_ascii=False)


def _check_size(functions: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Raises InvalidRequestError: a schema of all their parameters would be too long.

    Before they are read, which takes time.
    """
    parameters = [function.get("parameters") for _, function in functions]
    try:
        num_bytes = len(json.dumps(parameters, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, TypeError, RecursionError):
        return  # found again, and told by name, where each is read
    if num_bytes > MAX_STRUCTURE_BYTES:
        raise InvalidRequestError(
            f"tools has parameters of {num_bytes} bytes as JSON: where one must be called, they "
            f"must be at most {MAX_STRUCTURE_BYTES}"
        )


def _function(where: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a tool says of its function, beside its type or by itself."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"{where}.function is of type {type(function).__name__}: must be an object"
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.function.name={name!r:.80} must be a text, not empty")
    return function


def _call(where: str, function: Mapping[str, Any], root: tuple[str, ...]) -> dict[str, Any]:
    """The schema of one function's calls, which is to stand at `root`."""
    arguments = _arguments(where, function.get("parameters"))
    _move_references(arguments, "/".join(("#", *root, "properties", "arguments")))
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(where: str, parameters: object) -> dict[str, Any]:
    """A copy of a function's parameters that allows objects alone."""
    if parameters is None:
        return dict(_NOTHING)
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(
            f"{where} is of type {type(parameters).__name__}: must be an object, a JSON schema"
        )
    try:
        schema: dict[str, Any] = json.loads(json.dumps(parameters))
        for key in _OF_DOCUMENTS:
            schema.pop(key, None)
        read_json_schema(json.dumps(schema))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is no JSON: {error}") from error
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    kind = schema.setdefault("type", "object")
    if kind != "object":
        raise InvalidRequestError(f"{where}.type={kind!r:.80} must be 'object'")
    if not schema.get("properties") and schema.keys() <= _SAYS_NOTHING:
        return dict(_NOTHING)
    # What a function doesn't name it doesn't take, unless its schema says so or is put together:
    # a model that must call could else go on naming arguments until its tokens are used up.
    if schema.get("properties") and not schema.keys() & _COMPOSED:
        schema.setdefault("additionalProperties", False)
    return schema


def _move_references(schema: dict[str, Any], root: str) -> None:
    """Lets references from the schema's root point to the same places below `root`."""
    for part in list(_parts(schema)):
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            part["$ref"] = root + reference[1:]


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects that are schemas; with a stack, since it may be deep."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack.extend(part)
        if not isinstance(part, dict):
            continue
        yield part
        for key, value in part.items():
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                stack.extend(value.values())
            elif key not in _DATA:
                stack.append(value)
