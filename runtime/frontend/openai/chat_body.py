"""What a client asks of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from runtime.errors import InvalidRequestError
from runtime.frontend.chat_messages import RESERVED_ARGUMENTS
from runtime.frontend.openai.body import Object, Objects, describe
from runtime.frontend.openai.generation_body import GenerationBody, set_structures
from runtime.frontend.openai.json_forms import read_response_format
from runtime.frontend.openai.tools import ToolUse
from runtime.frontend.prompts import Chat
from runtime.sampling_params import MAX_LOGPROBS, SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORT = "reasoning_effort"  # what templates call it too

_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
_MESSAGES = WithJsonSchema(
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
                "reasoning_content": {"type": ["string", "null"]},
                "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
                "tool_call_id": {"type": ["string", "null"]},
            },
            "required": ["role"],
        },
    }
)
_TOOL_CHOICE = WithJsonSchema(
    {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}},
                        "required": ["name"],
                    },
                },
                "required": ["type", "function"],
            },
        ]
    }
)


class ChatBody(GenerationBody):
    """A conversation to go on with."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "modalities": (["text"],),
        "audio": (),
        "functions": ([],),
        "function_call": ("none",),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
    }

    messages: Annotated[Objects, _MESSAGES]
    max_completion_tokens: int | None = Field(
        default=None, description="Most new tokens; all that fit where unset. Or max_tokens."
    )
    tools: Objects | None = Field(default=None, description="Functions that may be called.")
    tool_choice: Annotated[Any, _TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether an answer may have several calls. Default true."
    )
    response_format: Object | None = Field(
        default=None, description="Type text, json_object, or json_schema with its json_schema."
    )
    logprobs: bool | None = Field(
        default=None, description="Tell the log probability of each token."
    )
    top_logprobs: int | None = Field(
        default=None, description="And of so many most probable ones; needs logprobs."
    )
    reasoning_effort: str | None = Field(
        default=None, description="Told to the chat template, which may know it."
    )

    # Beyond OpenAI's API.
    chat_template_kwargs: Object | None = Field(
        default=None, description="Variables for the chat template."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="Let an answer begin: default, unless one is continued."
    )
    continue_final_message: bool | None = Field(
        default=None, description="Go on with the text of the last message."
    )

    @property
    def has_form(self) -> bool:
        """Whether the output must have one, apart from calls of tools."""
        return (
            bool(set_structures(self.sampling_values()))
            or read_response_format(self.response_format) is not None
        )

    def read_tool_use(self) -> ToolUse:
        """Raises InvalidRequestError: the tools are none, or can't be used as asked."""
        return ToolUse.read(
            self.tools or [], self.tool_choice, is_parallel=self.parallel_tool_calls is not False
        )

    def read_chat(self, use: ToolUse) -> Chat:
        """What the template gets. Raises InvalidRequestError, naming the field."""
        for place, message in enumerate(self.messages):
            role = message.get("role")
            if role not in ROLES:
                raise InvalidRequestError(
                    f"messages[{place}].role={describe(role)} must be one of {', '.join(ROLES)}"
                )
        arguments = dict(self.chat_template_kwargs or {})
        for name in RESERVED_ARGUMENTS:
            if name in arguments:
                raise InvalidRequestError(
                    f"chat_template_kwargs.{name} can't be set: the request's own fields set it"
                )
        if self.reasoning_effort is not None:
            arguments.setdefault(EFFORT, self.reasoning_effort)
        continues = bool(self.continue_final_message)
        begins = self.add_generation_prompt
        return Chat(
            messages=self.messages,
            tools=use.shown,
            arguments=arguments,
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
        )

    def sampling_params(self, use: ToolUse) -> SamplingParams:
        """`max_tokens` may be unset.

        Raises InvalidRequestError: a field is out of range, or doesn't go with another.
        """
        self.check_stream()
        values = self.sampling_values()
        form = read_response_format(self.response_format)
        others = [*set_structures(values), *([] if form is None else ["response_format"])]
        if len(others) > 1 and form is not None:
            raise InvalidRequestError(f"{' and '.join(others)} are set: at most one may be")
        if others and use.may_call:
            raise InvalidRequestError(
                f"{others[0]} and tools are set: an output that has a form can't call tools, so "
                "leave one out or set tool_choice to 'none'"
            )
        schema = use.forced_schema if form is None else form
        if schema is not None:
            values["json_schema"] = schema
        values["max_tokens"] = self._max_tokens()
        values["logprobs"] = self._num_logprobs()
        return SamplingParams(**values)

    def _max_tokens(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequestError(
                f"max_tokens={describe(self.max_tokens)} and max_completion_tokens="
                f"{describe(self.max_completion_tokens)} are set: leave one out"
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _num_logprobs(self) -> int | None:
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs={describe(top)} must be in [0, {MAX_LOGPROBS}]"
            )
        if top and not self.logprobs:
            raise InvalidRequestError(f"top_logprobs={top} is set: it needs logprobs=true")
        return (top or 0) if self.logprobs else None
