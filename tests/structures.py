"""Structures for tests: what may be sampled, and what says whether a text is one.

All but the last few end soon by themselves, so that random tokens reach the end.
"""

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
BOOLEAN = {"type": "boolean"}
COLOR = {"enum": ["red", "green", "blue"]}
POINT = _object(x=DIGIT, y=DIGIT)
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": DIGIT,
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
LINKED_LIST = {
    "$defs": {"cell": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]}},
    "$ref": "#/$defs/cell",
}
LINKED_LIST["$defs"]["pair"] = _object(head=DIGIT, tail={"$ref": "#/$defs/cell"})
EXPRESSION = {
    "$defs": {
        "expression": {
            "anyOf": [
                DIGIT,
                _object(
                    op={"enum": ["+", "*"]},
                    left={"$ref": "#/$defs/expression"},
                    right={"$ref": "#/$defs/expression"},
                ),
            ]
        }
    },
    "$ref": "#/$defs/expression",
}

SCHEMAS: list[Schema] = [
    # values
    {"type": "null"},
    BOOLEAN,
    DIGIT,
    {"type": "integer", "minimum": -120, "maximum": 4071},
    {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 17},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": ["string", "null"], "maxLength": 5},
    SHORT,
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"const": {"kind": "fixed", "list": [1, None, True]}},
    {"const": 'naïve \n "quoted" \\ text'},
    {"enum": ["one", 2, None, [3], {"four": 4}]},
    COLOR,
    # patterns and formats
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"type": "string", "pattern": "^(\\d{3}-)?\\d{4}$"},
    {"type": "string", "pattern": "^[A-Z][a-z]{1,4}( [A-Z][a-z]{1,4}){0,2}$"},
    {"type": "string", "pattern": "^#([0-9a-f]{3}|[0-9a-f]{6})$"},
    {"type": "string", "pattern": "^\\w{1,4}$", "minLength": 2},
    {"type": "string", "pattern": "b", "maxLength": 4},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    # unicode
    {"enum": ["grün", "κόκκινο", "青", "👩‍👩‍👧‍👦", "สีแดง"]},
    {"type": "string", "pattern": "^[\u0431-\u044f]{1,6}$"},
    {"type": "string", "pattern": "^[\U0001f600-\U0001f64f]{1,3}$"},
    {"type": "string", "pattern": "^(مرحبا|こんにちは)$"},
    _object(**{"ключ": DIGIT, "鍵": BOOLEAN, 'a"b\\c': {"type": "null"}}),
    # arrays
    {"type": "array", "items": DIGIT, "maxItems": 5},
    {"type": "array", "items": COLOR, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": BOOLEAN, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "prefixItems": [DIGIT, COLOR], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [BOOLEAN], "items": {"type": "null"}, "maxItems": 4},
    # objects
    {"type": "object", "additionalProperties": False},
    POINT,
    _object(name=SHORT, age=DIGIT, color=COLOR),
    {"type": "object", "properties": {"a": DIGIT, "b": COLOR}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": BOOLEAN, "b": BOOLEAN, "c": BOOLEAN},
        "required": ["b"],
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": BOOLEAN},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    # nested and combined
    _object(line={"type": "array", "items": POINT, "minItems": 1, "maxItems": 3}, closed=BOOLEAN),
    _object(a=_object(b=_object(c=_object(d=_object(e=COLOR))))),
    {"anyOf": [POINT, {"type": "array", "items": DIGIT, "maxItems": 2}, {"type": "null"}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, DIGIT]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 8}]},
    {
        "title": "a shape",
        "description": "notes constrain nothing",
        "anyOf": [
            _object(kind={"const": "circle"}, radius=DIGIT),
            _object(kind={"const": "square"}, side=DIGIT),
        ],
    },
    {"definitions": {"color": COLOR}, **_object(ink={"$ref": "#/definitions/color"})},
    # recursive
    TREE,
    LINKED_LIST,
    EXPRESSION,
]

REGEXES: list[str] = [
    r"[a-z]+",
    r"\d{3}-\d{4}",
    r"(foo|bar|foobar)+",
    r"a?b?c?",
    r"",
    r"[^\n]{0,8}",
    r"(\+|-)?\d{1,4}(\.\d{1,3})?",
    r"[a-z.]{1,8}@[a-z\d]{1,8}\.(com|org)",
    r"/usr/(bin|lib)/[^/\x00-\x20]{1,5}",
    '"[^"]{0,6}"',
    r"(?i)yes|no",
    r"\x41\u00e9[αβγ]{2}",
    r"[一-龥]{1,3}。",
    r"(👍🏽|👩‍👧)*",
    r"(?s).{1,4}",
    r"#[0-9A-Fa-f]{6}",
    r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
    r"(ab*){2,3}c",
    r"\[(\d(, \d){0,3})?\]",
    r"(?P<year>\d{4})\n\t\s",
]

# Each with a regular expression, in Python's syntax, that its texts match too.
GRAMMARS: list[tuple[str, str]] = [
    ('start: "yes" | "no" "t"?', r"yes|not?"),
    (
        """
        start: "sum: " expr                     // "comment" ::= %json
        expr: expr ("+" | "-") term | term
        term: NUMBER | "(" expr ")"
        NUMBER: /[0-9]{1,2}/
        %ignore / /
        """,
        r"sum: [ 0-9+()-]+",
    ),
    ('start: pair ("," pair)*\npair: KEY "=" /[0-9]/\nKEY: "a".."c"', r"[abc]=\d(,[abc]=\d)*"),
    ('start: WORD{2,3}\nWORD: LETTER~2 ";"\nLETTER: "x"i | "é"', r"([xXé]{2};){2,3}"),
    ('start: "<" /[^<>]{0,4}/ ">" "%json" "@"\n', r"<[^<>]{0,4}>%json@"),
    ("%import common.INT\nstart: INT /;|/", r"\d+;?"),
    ("start: T\nT: /[ab]{0,4}/ & ~/.*bb.*/", r"(?!.*bb)[ab]{0,4}"),
]

CHOICES: list[list[str]] = [
    ["positive", "negative", "neutral"],
    ["a", "ab", "abc"],
    ["(.*)", "a|b", "\\d", '"/"', "line\nbreak"],
    ["ja", "ні", "はい", "👩‍👩‍👧‍👦"],
]
