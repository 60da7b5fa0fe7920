"""Messages that nobody would send on purpose, made from good ones by a seeded `random.Random`."""

import copy
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_BYTE_EDITS = 4

# JSON that is no JSON, or more than a reader expects.
LITERALS = (
    *("null", "true", "false", "0", "-1", "1", "2", "1.0", "0.5", "-0.0", "1e999", "-1e999"),
    *("NaN", "Infinity", "-Infinity", "2147483648", "9223372036854775808", "18446744073709551616"),
    *("1" * 400, "0." + "1" * 400, '""', '"a"', '"\\u0000"', '"\\ud800"', '"a\\udfff\\ud83d"'),
    *('"' + "y" * 300 + '"', '"\U0001f600"', "[]", "{}", "[null]", '[""]', "[[]]", "[[[]]]"),
    *("[1, 2, 3]", '["a", "b"]', "[-1]", "[" * 300 + "]" * 300, '{"a": ' * 300 + "1" + "}" * 300),
    *('{"": {"": []}}', '{"type": "function"}', '{"type": "object"}', "tru", "'a'", "01", ""),
    *("[" + "0," * 500 + "0]", '{"type": "json_schema"}', '{"include_usage": 1}'),
)

INT_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (32, True),
    FieldDescriptor.CPPTYPE_INT64: (64, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
}
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-310, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
STRINGS = (
    *("", "a", "\0", "\u2028", "\U0001f600", "a" * 2000, "{}", "[", "null", '{"type": "object"}'),
    *('{"$ref": "#"}', "(a|b)*c", "(", "a{1000}{1000}", 'start: "a"', "start: start"),
    '{"a":' * 200,
)


@dataclass(frozen=True)
class Literal:
    """JSON text as it is to be sent."""

    text: str


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may come twice."""

    items: tuple[tuple[str, Any], ...]


def mutate_bytes(draw: random.Random, data: bytes, words: Sequence[bytes] = ()) -> bytes:
    """Flips, cuts, repeats and inserts; `words` are what may be inserted, beside noise."""
    for _ in range(draw.randint(1, MAX_BYTE_EDITS)):
        start = draw.randint(0, len(data))
        end = min(len(data), start + draw.choice([0, 1, 1, 4, 30]))
        part = data[start:end]
        match draw.randrange(6):
            case 0:
                part = bytes(byte ^ (1 << draw.randrange(8)) for byte in part)
            case 1:
                part = b""
            case 2:
                part = part * draw.choice([2, 2, 50])
            case 3:
                part += draw.randbytes(draw.choice([1, 2, 8]))
            case 4 if words:
                part += draw.choice(words)
            case _:
                part = draw.randbytes(len(part))
        data = data[:start] + part + data[end:]
    return data[: draw.randint(0, len(data))] if draw.random() < 0.1 else data


def mutate_json(draw: random.Random, body: Mapping[str, Any], fields: Sequence[str]) -> bytes:
    """A body with wrong values; `fields` are names that may be added to it."""
    root: Any = copy.deepcopy(dict(body))
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if draw.random() < 0.4:
            root[draw.choice(fields)] = _any_value(draw)
        else:
            _spoil(draw, root)
    if draw.random() < 0.1:
        root = Pairs((*root.items(), *((key, _any_value(draw)) for key in root)))
    if draw.random() < 0.02:
        root = _any_value(draw)
    content = write_json(root).encode()
    return mutate_bytes(draw, content) if draw.random() < 0.1 else content


def write_json(value: Any) -> str:
    match value:
        case Literal():
            return value.text
        case Pairs():
            return _write_pairs(value.items)
        case dict():
            return _write_pairs(tuple(value.items()))
        case list():
            return f"[{', '.join(map(write_json, value))}]"
        case _:
            return json.dumps(value)


def _write_pairs(items: tuple[tuple[str, Any], ...]) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {write_json(each)}" for key, each in items) + "}"


def _any_value(draw: random.Random) -> Any:
    if draw.random() < 0.2:
        return [_any_value(draw) for _ in range(draw.randint(0, 3))]
    if draw.random() < 0.1:
        return {draw.choice(["", "a", "type", "5"]): _any_value(draw)}
    return Literal(draw.choice(LITERALS))


def _spoil(draw: random.Random, root: dict[str, Any]) -> None:
    """Changes one place of it, at any depth."""
    places = _places(root)
    if not places:
        return
    holder, key = draw.choice(places)
    if draw.random() < 0.4:
        holder[key] = _alike(draw, holder[key])
    elif draw.random() < 0.2:
        del holder[key]
    elif draw.random() < 0.3 and isinstance(holder, dict):
        holder[draw.choice(["", "type", "name", "x" * 200])] = _any_value(draw)
    else:
        holder[key] = _any_value(draw)


def _alike(draw: random.Random, value: Any) -> Any:
    """Another value of its kind, which may well do."""
    match value:
        case bool():
            return not value
        case int() | float():
            return draw.choice([0, 1, 2, 3, 5, 20, 0.25, 1.5, value])
        case str():
            return draw.choice(["a", "\u0644\u0627 two", "[a-c]", "user", "auto", value * 2])
        case list():
            return value * 2
        case _:
            return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Where there is something, as containers with keys."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return []
    return [(value, key) for key in keys] + [each for key in keys for each in _places(value[key])]


def spoil_message(draw: random.Random, message: Message, share: float) -> None:
    """Gives that share of the fields extreme values, those of messages inside too."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() >= share:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            for _ in range(draw.choice([1, 3, 2000])):
                entries[_extreme(draw, field.message_type.fields_by_name["key"])] = draw.choice(
                    FLOATS
                )
        elif field.is_repeated:
            _extend(draw, message, field, share)
        elif field.message_type is not None:
            spoil_message(draw, getattr(message, field.name), share)
        else:
            setattr(message, field.name, _extreme(draw, field))


def _extend(draw: random.Random, message: Message, field: FieldDescriptor, share: float) -> None:
    values = getattr(message, field.name)
    count = draw.choice([1, 2, 20, 300])
    if field.message_type is None:
        values.extend(_extreme(draw, field) for _ in range(count))
        return
    for _ in range(count):
        spoil_message(draw, values.add(), share)


def _extreme(draw: random.Random, field: FieldDescriptor) -> Any:
    if field.cpp_type in INT_BITS:
        bits, is_signed = INT_BITS[field.cpp_type]
        most = (1 << (bits - is_signed)) - 1
        return draw.choice([0, 1, 2, 5, most, -most - 1 if is_signed else most - 1])
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice([0, 1, 100]))
        case FieldDescriptor.CPPTYPE_STRING:
            return draw.choice(STRINGS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return draw.choice([0, 1, 99, -1])
        case _:
            return draw.choice(FLOATS)
