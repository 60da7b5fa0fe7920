"""Calls of tools written as calls in Python, of which only literals are taken."""

import ast
import json
import warnings
from typing import NamedTuple

# A longer text is no call: what parses it has to see it whole.
MAX_CODE_CHARS = 100_000


class PythonCall(NamedTuple):
    """A name, perhaps with dots, and the JSON text of the arguments."""

    name: str
    arguments: str


def read_python_calls(code: str) -> list[PythonCall] | None:
    """Calls with named arguments: one a line, perhaps inside `print(...)`, or lists of them.

    Never runs anything. None where `code` is, or has in it, anything else.
    """
    if len(code) > MAX_CODE_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings, which aren't ours
            body = ast.parse(code.strip()).body
        return [_read_call(node) for statement in body for node in _calls_of(statement)] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _calls_of(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError("no call")
    match statement.value:
        case ast.List(elts=calls):
            return calls
        case ast.Call(func=ast.Name(id="print"), args=[ast.Call() as call], keywords=[]):
            return [call]
        case call:
            return [call]


def _read_call(node: ast.expr) -> PythonCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is no name")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate can't be sent to anyone
    return PythonCall(_read_name(node.func), text)


def _read_name(node: ast.expr) -> str:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("no name")
    return ".".join([node.id, *reversed(names)])
