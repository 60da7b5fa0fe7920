"""Which tools a chat may call, and which it must."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from runtime.errors import InvalidRequestError
from runtime.frontend.openai.body import describe
from runtime.frontend.parsers.call_schema import call_schema
from runtime.frontend.prompts import MAX_TOOLS

Tool = Mapping[str, Any]
CHOICES = ("none", "auto", "required")
MAX_TOOLS_BYTES = 1 << 20  # as JSON; no model could read more


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request's tools and tool_choice mean."""

    shown: Sequence[Tool]  # to the model: those that it may call
    forced_schema: str | None  # of the output, where it must call
    is_named: bool  # the client chose the function
    is_parallel: bool  # there may be more than one call

    @classmethod
    def read(cls, tools: Sequence[Tool], choice: object, *, is_parallel: bool) -> Self:
        """Raises InvalidRequestError: the tools are none, or can't be used as `choice` says."""
        if len(tools) > MAX_TOOLS:
            raise InvalidRequestError(
                f"tools has {len(tools)} entries: must be at most {MAX_TOOLS}"
            )
        num_bytes = 0
        for place, tool in enumerate(tools):
            _check_tool(f"tools[{place}]", tool)
            num_bytes += len(json.dumps(tool, ensure_ascii=False).encode())
            if num_bytes > MAX_TOOLS_BYTES:
                raise InvalidRequestError(
                    f"tools have more than {MAX_TOOLS_BYTES} bytes as JSON: name fewer, or "
                    "describe them in fewer words"
                )
        kind, name = _read_choice(choice, has_tools=bool(tools))
        if kind in ("required", "function") and not tools:
            raise InvalidRequestError(
                f"tool_choice={describe(choice)} is set without tools: it needs at least 1"
            )
        forced = None
        if kind in ("required", "function"):
            forced = call_schema(tools, name=name, parallel=is_parallel and name is None)
        return cls(
            shown=() if kind == "none" else tools,
            forced_schema=forced,
            is_named=name is not None,
            is_parallel=is_parallel,
        )

    @property
    def may_call(self) -> bool:
        return bool(self.shown)

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """The functions' parameters by name, of those that have any."""
        functions = [tool["function"] for tool in self.shown]
        return {
            each["name"]: each["parameters"]
            for each in functions
            if isinstance(each.get("parameters"), Mapping)
        }


def _check_tool(where: str, tool: Tool) -> None:
    if tool.get("type") != "function":
        raise InvalidRequestError(
            f"{where}.type={describe(tool.get('type'))} can't be served: must be 'function'"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.function is {describe(function)}: must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(
            f"{where}.function.name={describe(name)} must be a text, not empty"
        )


def _read_choice(choice: object, *, has_tools: bool) -> tuple[str, str | None]:
    """What is chosen, and the function's name where it is one."""
    if choice is None:
        return ("auto" if has_tools else "none"), None
    if isinstance(choice, str) and choice in CHOICES:
        return choice, None
    if not isinstance(choice, Mapping):
        raise InvalidRequestError(
            f"tool_choice={describe(choice)} must be 'none', 'auto', 'required' or a function"
        )
    if choice.get("type") != "function":
        raise InvalidRequestError(
            f"tool_choice.type={describe(choice.get('type'))} can't be served: must be 'function'"
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError("tool_choice.function.name is missing: it must name a function")
    return "function", name
