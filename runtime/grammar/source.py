r"""From a structure to the grammar text that llguidance compiles.

JSON comes without white space, but for one optional space after each comma and colon: as JSON
libraries write it by default, compact or not, and without room for a model to write spaces for
ever. Properties come in the schema's order, and strings without \u escapes.

A regular expression matches the whole output, in the syntax of Rust's regex crate, without
look-around, back references, anchors inside and `\b`. `\d`, `\w` and `\s` are Unicode's; in the
`pattern` of a JSON schema the first two are ASCII's, as in ECMAScript.
"""

import json

from runtime.errors import InvalidRequestError
from runtime.grammar.dialect import check_dialect
from runtime.grammar.json_schema import read_json_schema
from runtime.grammar.json_strings import ALLOWED_ESCAPES
from runtime.structure import Structure

# Without it, where the text is forced, a mask allows one way to cut it into tokens and no other.
# At the end, so that messages count the caller's lines.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": ALLOWED_ESCAPES,
}


def write_source(structure: Structure, *, max_bytes: int) -> str:
    """Grammar text. Raises InvalidRequestError: too long, or not what the kind asks for."""
    kind, text = structure.kind, structure.text
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{kind} has a lone surrogate at {error.start}") from error
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"{kind} of {num_bytes} bytes must be at most {max_bytes} bytes")
    if kind == "json_schema":
        schema = read_json_schema(text) | {"x-guidance": _JSON_OPTIONS}
        return _join("start: @body", {"name": "body", "json_schema": schema})
    if kind == "regex":
        return _join(f"start: {_regex_literal(text)}")
    if kind == "grammar":
        check_dialect(text)
        return _join(text)
    return _join(f"start: {_choices_literal(text)}")


def _join(text: str, *others: dict[str, object]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text + _OPTIONS}, *others]})


def _regex_literal(text: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(text, use_ascii='')}/" if text else '""'


def _choices_literal(text: str) -> str:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"choices is no JSON list of strings: {error}") from error
    if not isinstance(choices, list) or not choices:
        raise InvalidRequestError("choices must be a list of at least one string")
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidRequestError(f"choices[{index}]={choice!r} must be a string, not empty")
    return "/" + "|".join("".join(map(_escape, choice)) for choice in choices) + "/"


def _escape(char: str) -> str:
    if 0xD800 <= ord(char) <= 0xDFFF:
        raise InvalidRequestError(f"choices has a lone surrogate, U+{ord(char):04X}")
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"
