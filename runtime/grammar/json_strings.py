r"""What the strings of JSON output may hold: no control characters but those with a short escape.

A key may be written in more than one way where JSON's \u escapes are allowed, and a named property
would then pass for another one. So they aren't, and no string has U+007F, or U+0000 to U+001F but
for \b, \t, \n, \f and \r. A constant or a name with one of them is refused.

llguidance reads over a part of a pattern that matches nothing else, as if it weren't there; and
where it matches all of them, it lets quotes and backslashes in too. So patterns are written anew,
without them.
"""

import re
from typing import Any

from runtime.errors import InvalidRequestError

ALLOWED_ESCAPES = 'bfnrt"\\'
_UNWRITABLE = frozenset({*map(chr, range(32)), "\x7f"} - {*"\b\t\n\f\r"})
_WRITABLE_CLASS = r"[^\x00-\x07\x0B\x0E-\x1F\x7F]"
_NOTHING = "[a&&b]"

_ATOM = re.compile(
    r"""
      (?P<set> \[ \^? \]? (?: \\. | [^\]\\] )* \] )
    | (?P<property> \\[pP] (?: \{ [^}]* \} | . ) )
    | (?P<verbose> \(\? [A-Za-z-]* x )
    | \\ (?: x(?P<x>[0-9A-Fa-f]{2}) | u(?P<u>[0-9A-Fa-f]{4}) | U(?P<U>[0-9A-Fa-f]{8})
           | [xuU]\{ (?P<braces>[0-9A-Fa-f]+) \} | (?P<escape>.) )
    | (?P<char> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_NAMED = {"a": "\a", "v": "\v"}
_SET_OPERATIONS = ("[", "&&", "--", "~~")  # to Rust's regex crate, and text to ECMAScript


def writable_pattern(pattern: str) -> str:
    """One that matches the same but for strings that can't be written.

    Raises InvalidRequestError: it has what is no JSON schema's.
    """
    return _ATOM.sub(_writable_atom, pattern)


def check_value(value: Any) -> None:
    """Raises InvalidRequestError: a string in it can't be written."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack.extend(part)
        elif isinstance(part, dict):
            stack.extend((*part, *part.values()))
        elif isinstance(part, str) and not _UNWRITABLE.isdisjoint(part):
            raise InvalidRequestError(
                f"{part[:40]!r} has a control character, and strings have none but "
                f"\\b, \\t, \\n, \\f and \\r"
            )


def _writable_atom(atom: re.Match[str]) -> str:
    text = atom[0]
    if atom["verbose"]:
        raise InvalidRequestError("a pattern with the flag x isn't supported")
    if atom["set"]:
        plain = re.sub(r"\\.", "x", text[1:], flags=re.DOTALL)
        if any(operation in plain for operation in _SET_OPERATIONS):
            raise InvalidRequestError(
                f"pattern: {text[:40]!r} has one of {', '.join(_SET_OPERATIONS)}; write it with \\"
            )
    if atom["set"] or atom["property"]:
        return f"[{text}&&{_WRITABLE_CLASS}]"
    return _NOTHING if _character(atom) in _UNWRITABLE else text


def _character(atom: re.Match[str]) -> str:
    """What stands for one character; "" for classes, which match others too."""
    digits = atom["x"] or atom["u"] or atom["U"] or atom["braces"]
    if digits:
        return chr(min(int(digits, 16), 0x10FFFF))
    return atom["char"] or _NAMED.get(atom["escape"], "")
