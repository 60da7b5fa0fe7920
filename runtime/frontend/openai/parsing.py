"""Which parser the answers of a chat need."""

from dataclasses import dataclass

from runtime.frontend.chat import ChatTemplate
from runtime.frontend.openai.tools import ToolUse
from runtime.frontend.parsers.events import OutputParser
from runtime.frontend.parsers.output_parser import (
    ToolFormat,
    detect_reasoning,
    detect_tools,
    make_parser,
    marks_of,
    starts_inside,
)
from runtime.frontend_config import ReasoningParserName, ToolParserName


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    """How one chat's answers are read."""

    tools: ToolFormat
    reasoning: bool
    use: ToolUse

    @property
    def marks(self) -> tuple[str, ...]:
        """What it looks for, of which some may be special tokens."""
        return marks_of(tools=self.tools, reasoning=self.reasoning)

    def make_parser(self, prompt_text: str) -> OutputParser:
        """For one choice of the chat that was rendered as `prompt_text`."""
        return make_parser(
            tools=self.tools,
            reasoning=self.reasoning,
            starts_inside=starts_inside(prompt_text),
            parameters=self.use.parameters,
        )


class ParserChoice:
    """What the operator wants, or else what the model's chat template shows."""

    def __init__(
        self,
        template: ChatTemplate | None,
        *,
        tools: ToolParserName = "auto",
        reasoning: ReasoningParserName = "auto",
    ) -> None:
        self._template = template
        self._tools = tools
        self._reasoning = reasoning

    def parsing(self, use: ToolUse, *, has_form: bool) -> Parsing:
        """`has_form`: what the output looks like is forced, so there is no room for reasoning.

        Raises ConfigError: the model's chat templates can't be used.
        """
        if use.forced_schema is not None:
            return Parsing(tools="enforced", reasoning=False, use=use)
        source = self._source(use)
        tools: ToolFormat = "none"
        if use.may_call:
            tools = detect_tools(source) if self._tools == "auto" else self._tools
        reasoning = self._reasoning == "think"
        if self._reasoning == "auto":
            reasoning = detect_reasoning(source)
        return Parsing(tools=tools, reasoning=reasoning and not has_form, use=use)

    def _source(self, use: ToolUse) -> str:
        return "" if self._template is None else self._template.source(has_tools=use.may_call)
