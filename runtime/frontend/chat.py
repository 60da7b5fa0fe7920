"""Chats as prompts: rendered by the model's own template, or by the operator's.

Rendering runs in a process of its own, since a template is somebody else's program.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from runtime.errors import ConfigError, InvalidRequestError, LockstepError, UnavailableError
from runtime.frontend.chat_files import (
    DEFAULT,
    TOOL_USE,
    read_special_tokens,
    read_template,
    read_templates,
)
from runtime.frontend.chat_messages import (
    DEVELOPER,
    Message,
    check_arguments,
    check_messages,
    check_tools,
    cut_at_mark,
    has_parts,
    join_parts,
    mark_end,
    name_developers,
    name_reasoning,
)
from runtime.frontend.chat_process import MAX_MEMORY_BYTES, Fault, RenderError, RenderProcess


class ChatTemplate:
    """Turns messages into the text of a prompt. For one event loop; `close` it in the end.

    One chat is rendered after another: a template takes about a millisecond, or misbehaves.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], *, max_bytes: int
    ) -> None:
        """`templates` by name, `special_tokens` as their variables, texts of at most `max_bytes`.

        Nothing is started before the first chat.
        """
        self._templates = dict(templates)
        self._max_bytes = max_bytes
        self._process = RenderProcess(templates, {**special_tokens, "documents": None})
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat")

    @classmethod
    def load(cls, folder: str, override: Path | None = None, *, max_bytes: int) -> Self | None:
        """The template in the file `override`, or else those of a model's folder; None without.

        Blocks. The operator's file is tried at once, the model's own by the first chat.
        Raises ConfigError: a file can't be read, or `override` is no template.
        """
        path = Path(folder)
        templates = read_templates(path) if override is None else {DEFAULT: read_template(override)}
        if not templates:
            return None
        template = cls(templates, read_special_tokens(path), max_bytes=max_bytes)
        if override is not None:
            try:
                template._process.start()
            except RenderError as error:
                template.close()
                raise ConfigError(f"chat_template={override}: {error.message}") from error
        return template

    async def render(
        self,
        messages: Sequence[object],
        *,
        tools: Sequence[object] = (),
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        timeout_s: float,
    ) -> str:
        """The prompt's text, to be tokenized without adding special tokens: it has them.

        `messages` are as clients of chat APIs know them, `arguments` are variables for the
        template. Contents that are lists of parts are joined where the template knows texts alone.
        `timeout_s` is the time for rendering, without that for waiting until others are rendered.
        Raises InvalidRequestError: messages or tools are none, or the template refuses them, fails
        or takes too long, too much memory or text. Raises ConfigError: the model's template can't
        be used. Raises UnavailableError: its process was killed, or closed.
        """
        checked = check_messages(messages)
        variables = check_arguments(arguments or {}) | {
            "tools": check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message are set: at most one may be, "
                "since an answer either begins or goes on"
            )
        name = self._pick(has_tools=variables["tools"] is not None)
        if DEVELOPER not in self._templates[name]:
            checked = name_developers(checked)
        render = self._continue if continue_final_message else self._render
        try:
            job = self._thread.submit(render, name, checked, variables, timeout_s)
        except RuntimeError as error:
            raise UnavailableError("the frontend ends") from error
        try:
            # Who is cancelled meanwhile leaves the thread to end on its own.
            return await asyncio.wrap_future(job)
        except RenderError as error:
            raise self._explain(error, timeout_s) from error

    def source(self, *, has_tools: bool) -> str:
        """Of the template for chats with tools, or without. Raises ConfigError: there is none."""
        return self._templates[self._pick(has_tools=has_tools)]

    def close(self) -> None:
        """Ends the process; chats that are rendered or wait for it end with UnavailableError."""
        self._process.close()
        self._thread.shutdown()
        self._process.end()

    def _pick(self, *, has_tools: bool) -> str:
        if has_tools and TOOL_USE in self._templates:
            return TOOL_USE
        if DEFAULT not in self._templates:
            raise ConfigError(
                f"the model's chat templates are {', '.join(sorted(self._templates))}, and none is "
                f"{DEFAULT}: start the server with --chat-template FILE"
            )
        return DEFAULT

    def _render(
        self, name: str, messages: Sequence[Message], variables: dict[str, Any], timeout_s: float
    ) -> str:
        variables["messages"] = name_reasoning(self._as_known(name, messages, variables, timeout_s))
        return self._process.render(name, variables, timeout_s=timeout_s, max_bytes=self._max_bytes)

    def _continue(
        self, name: str, messages: Sequence[Message], variables: dict[str, Any], timeout_s: float
    ) -> str:
        known = self._as_known(name, messages, variables, timeout_s)
        # Nobody can have written it in a message.
        mark = f"continue-here-{secrets.token_hex(8)} "
        marked, text = mark_end(known, mark)
        return cut_at_mark(self._render(name, marked, variables, timeout_s), mark, text)

    def _as_known(
        self, name: str, messages: Sequence[Message], variables: dict[str, Any], timeout_s: float
    ) -> Sequence[Message]:
        """The messages with contents that the template knows."""
        if has_parts(messages) and not self._process.takes_parts(
            name, variables, timeout_s=timeout_s
        ):
            return join_parts(messages)
        return messages

    def _explain(self, error: RenderError, timeout_s: float) -> LockstepError:
        match error.fault:
            case Fault.BROKEN:
                return ConfigError(
                    f"the model's chat template can't be read: {error.message}; start the server "
                    "with --chat-template FILE"
                )
            case Fault.DIED:
                return UnavailableError(f"the process that renders chats ended: {error.message}")
            case Fault.REFUSED:
                reason = f"refuses these messages: {error.message}"
            case Fault.FAILED:
                reason = f"can't render these messages: {error.message}"
            case Fault.NOT_JSON:
                reason = f"can't be given these messages, which are no JSON: {error.message}"
            case Fault.TOO_LONG:
                reason = f"makes a text that is longer than max_prompt_bytes={self._max_bytes}"
            case Fault.MEMORY:
                reason = f"needs more than {MAX_MEMORY_BYTES} bytes of memory for these messages"
            case Fault.TIMEOUT:
                reason = (
                    f"takes longer than chat_template_timeout_s={timeout_s:g} for these messages"
                )
        return InvalidRequestError(f"the chat template {reason}")


def missing_template(model: str) -> InvalidRequestError:
    """What to tell who sends a chat to a model that has no template."""
    return InvalidRequestError(
        f"model {model} has no chat template, so this server can't turn messages into a prompt: "
        "send text or token_ids, or start the server with --chat-template FILE"
    )
