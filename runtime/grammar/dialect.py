r"""The EBNF dialect: the part of Lark's that llguidance reads, without what reaches past the text.

A grammar is a list of definitions, the one called `start` being the whole output:

    start: "sum:" expr
    expr: expr "+" term | term          // left recursion is cheap, right recursion isn't
    term: NUMBER | "(" expr ")"
    NUMBER: /[0-9]+/
    %ignore / +/

A lowercase name is a rule, and may be recursive. An uppercase name is a terminal: one regular
expression, of other terminals too, and not recursive. "text" and "text"i (any case), /regex/ in
the syntax of Rust's regex crate, without look-around, back references and lazy `?`; a slash in it
is written `\/`, in a class too. `a b`, `a | b`, `( )`, `[a]` or `a?`, `a*`, `a+`, `a{2,5}` or
`a~2..5`, in terminals also `a & b` and `~a` (not).
`name[lazy]:` matches as little as possible. `%ignore` allows a terminal between others,
`%import common.INT` takes Lark's common terminals. Comments begin with `//` or `#`.

GBNF (`root ::= ...`) isn't accepted. Refused by name are also: inline schemas and expressions
(%json, %regex, %lark), library options (%llguidance), other grammars (@name), token ids and special
tokens (<...>), and rule options with a value (stop=, suffix=, capture=,
max_tokens=, temperature=).
"""

import re

from runtime.errors import InvalidRequestError

# In this order: what stands in a string, an expression or a comment is text. Where each of them
# begins and ends is what llguidance makes of it, or else it refuses the grammar; an expression ends
# at the first slash without a backslash, and may go over lines.
_TOKEN = re.compile(
    r"""
      (?P<text> "(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\])+/[imslux]*
              | (?://|\#)[^\n]* )
    | (?P<gbnf> ::= )
    | (?P<directive> %[A-Za-z_]+ )
    | (?P<special> <[^\s>]*> )
    | (?P<reference> @[A-Za-z0-9_]* )
    | (?P<option> (?:[A-Za-z_]+[ \t]*)?= )
    """,
    re.VERBOSE,
)
_DIRECTIVES = ("%ignore", "%import")


def check_dialect(grammar: str) -> None:
    """Raises InvalidRequestError: the grammar uses what isn't of the dialect."""
    for token in _TOKEN.finditer(grammar):
        kind = token.lastgroup
        if kind == "text" or token[0] in _DIRECTIVES:
            continue
        line = grammar.count("\n", 0, token.start()) + 1
        what = f"grammar, line {line}: {token[0][:40]!r}"
        if kind == "gbnf":
            raise InvalidRequestError(
                f"{what} is GBNF; write `name: ...`, with `start` for the whole output"
            )
        raise InvalidRequestError(
            f"{what} isn't supported: a grammar has rules, terminals, {' and '.join(_DIRECTIVES)}"
        )
