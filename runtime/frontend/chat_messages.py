"""The messages of a chat: what they must be, and how a template gets them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequestError

# Names under which a message's reasoning comes; the first is what most templates read.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# What a template gets under these names comes from the request's own fields.
RESERVED_ARGUMENTS = ("messages", "tools", "add_generation_prompt")

# The role of OpenAI's clients for what others call the system's messages.
DEVELOPER = "developer"
SYSTEM = "system"
# Of a chat's messages together; more would hold up the other requests while they are looked at.
MAX_CALLS = 4096
MAX_PARTS = 16384

Message = dict[str, Any]


def check_messages(messages: Sequence[object]) -> list[Message]:
    """Copies, without what is None, as templates ask whether a field is there.

    Arguments of calls that are texts of objects, as OpenAI's clients send them, become the objects
    that templates want; what a model has written otherwise stays a text. Fields other than role,
    content and tool_calls are for the template to judge.
    Raises InvalidRequestError, naming the field: messages[2].role.
    """
    if not messages:
        raise InvalidRequestError("messages is empty: it must have at least 1 message")
    _check_count(messages, "tool_calls", MAX_CALLS)
    _check_count(messages, "content", MAX_PARTS)
    return [_check_message(f"messages[{place}]", each) for place, each in enumerate(messages)]


def check_tools(tools: Sequence[object]) -> list[dict[str, Any]] | None:
    """None for an empty list. Raises InvalidRequestError, naming the field: tools[2]."""
    for place, tool in enumerate(tools):
        _require_object(f"tools[{place}]", tool)
    return [dict(tool) for tool in tools if isinstance(tool, Mapping)] or None


def check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequestError: a name is taken."""
    for name in RESERVED_ARGUMENTS:
        if name in arguments:
            raise InvalidRequestError(
                f"template_arguments.{name} can't be set: the request's own fields set it"
            )
    return dict(arguments)


def has_parts(messages: Sequence[Message]) -> bool:
    """Whether a content is a list of parts."""
    return any(isinstance(message.get("content"), list) for message in messages)


def join_parts(messages: Sequence[Message]) -> list[Message]:
    """The messages with texts for lists of parts: those of the parts, with nothing between."""
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def name_reasoning(messages: Sequence[Message]) -> list[Message]:
    """The messages with their reasoning under the names that templates read, as transformers'."""
    named: list[Message] = []
    for message in messages:
        texts = [message[name] for name in REASONING_FIELDS if name in message]
        if texts:
            message = {"thinking": texts[0], **message, "reasoning_content": texts[0]}
        named.append(message)
    return named


def name_developers(messages: Sequence[Message]) -> list[Message]:
    """The messages for a template that knows no developers: they are the system."""
    return [
        {**message, "role": SYSTEM} if message["role"] == DEVELOPER else message
        for message in messages
    ]


def mark_end(messages: Sequence[Message], mark: str) -> tuple[list[Message], str]:
    """The messages with `mark` behind the last one's text, and that text.

    Raises InvalidRequestError: it has no text to go on with.
    """
    *others, last = messages
    content = last.get("content")
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        marked: object = [*content[:-1], {**content[-1], "text": text + mark}]
    elif isinstance(content, str):
        text, marked = content, content + mark
    else:
        raise InvalidRequestError(
            f"continue_final_message is set, but messages[{len(others)}] has no text to continue"
        )
    return [*others, {**last, "content": marked}], text


def cut_at_mark(rendered: str, mark: str, text: str) -> str:
    """What stands before the mark: the chat up to the end of the last message's `text`.

    `mark` ends with a space: where the template has cut that off, it cuts the text's own as well.
    Raises InvalidRequestError: the template changed the text.
    """
    if mark.strip() not in rendered or text.strip() not in rendered:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template doesn't write the last "
            "message's text as it is"
        )
    end = rendered.rindex(mark.strip())
    before = rendered[:end]
    return before if rendered.startswith(mark, end) else before.rstrip()


def _check_count(messages: Sequence[object], name: str, most: int) -> None:
    """Raises InvalidRequestError: the lists of that name have too many entries together."""
    lists = [each.get(name) for each in messages if isinstance(each, Mapping)]
    count = sum(len(each) for each in lists if isinstance(each, list | tuple))
    if count > most:
        raise InvalidRequestError(
            f"messages have {count} entries in {name} together: must be at most {most}"
        )


def _check_message(where: str, message: object) -> Message:
    _require_object(where, message)
    assert isinstance(message, Mapping)
    present = {name: value for name, value in message.items() if value is not None}
    role = present.get("role", "")
    if not isinstance(role, str):
        raise InvalidRequestError(f"{where}.role is of type {_kind(role)}: must be str")
    if not role:
        raise InvalidRequestError(f"{where}.role is missing: it must say who speaks")
    calls = present.get("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(f"{where}.tool_calls is of type {_kind(calls)}: must be a list")
    if "tool_calls" in present:
        present["tool_calls"] = [
            _check_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)
        ]
    if "content" in present:
        present["content"] = _check_content(f"{where}.content", present["content"])
    elif not calls:
        raise InvalidRequestError(
            f"{where}.content is missing: a message without tool_calls must have one"
        )
    return present


def _check_call(where: str, call: object) -> dict[str, Any]:
    _require_object(where, call)
    assert isinstance(call, Mapping)
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    arguments = _read_arguments(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _read_arguments(text: str) -> dict[str, Any] | str:
    """The object that it is the text of, an empty one of none; else the text."""
    try:
        arguments = json.loads(text.strip() or "{}")
    except (ValueError, RecursionError):
        return text  # models write such, and clients send back what they got
    return arguments if isinstance(arguments, dict) else text


def _check_content(where: str, content: object) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(
            f"{where} is of type {_kind(content)}: must be a text or a list of parts"
        )
    return [_check_part(f"{where}[{place}]", part) for place, part in enumerate(content)]


def _check_part(where: str, part: object) -> dict[str, Any]:
    _require_object(where, part)
    assert isinstance(part, Mapping)
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"{where}.type={part.get('type')!r} can't be served: must be 'text'"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text is of type {_kind(text)}: must be str")
    return dict(part)


def _require_object(where: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} is of type {_kind(value)}: must be an object")


def _kind(value: object) -> str:
    return type(value).__name__
