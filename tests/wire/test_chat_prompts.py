"""Chats as prompts of the public API: rendered by the model's template, refused by field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import processors

from protos import inference_pb2
from runtime.frontend.text import Tokenizer
from runtime.request import FinishReason, RequestOutput
from tests.chats import write_folder
from tests.frontend import (
    LINES,
    MAX_MODEL_LEN,
    TIMEOUT_S,
    Client,
    FakeEngine,
    make_byte_fallback_tokenizer,
    make_model,
    status_of,
)
from tests.served import serving

pytestmark = pytest.mark.wire

Chat = inference_pb2.Chat
Message = inference_pb2.ChatMessage
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MAX_PROMPT_BYTES = 20_000
TEMPLATE = """\
{{ bos_token }}
{%- if tools %}tools {{ tools | tojson }};{% endif %}
{%- for m in messages %}
{%- if m.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}
{%- if m.role == 'loop' %}{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}
{%- endfor %}{% endif %}
{{- m.role }}: {% if m.content is defined %}{{ m.content }}{% else %}nothing{% endif %}
{%- if m.tool_calls is defined %} calls {{ m.tool_calls | tojson }}{% endif %};
{%- endfor %}
{%- if tone is defined %}{{ tone | tojson }};{% endif %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def write_model(folder: Path, template: str | None = TEMPLATE) -> Tokenizer:
    """As many models': the tokenizer begins every text with <s>, and so does the template."""
    tokenizer = make_byte_fallback_tokenizer(LINES)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    write_folder(folder, template)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(tokenizer)


class Chats:
    """A client of a model with a template, and what the engine gets of it."""

    def __init__(self, engine: FakeEngine, client: Client, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.client = client
        self._tokenizer = tokenizer

    def prompt(self, chat: inference_pb2.Chat | None = None, **request: Any) -> list[int]:
        call = self.client.generate(chat=chat, **request)
        connection, received = self.engine.added.get(timeout=TIMEOUT_S)
        connection.sink([RequestOutput(received.request_id, (7,), FinishReason.LENGTH)])
        (response,) = call
        assert response.usage.num_prompt_tokens == len(received.prompt_token_ids)
        return list(received.prompt_token_ids)

    def tokens(self, text: str) -> list[int]:
        """As they are written, special ones too, and none added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def refusal(self, chat: inference_pb2.Chat, **params: Any) -> str:
        code, details = status_of(self.client.generate(chat=chat, **params))
        assert code == INVALID, details
        assert self.engine.added.empty()
        return details


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_model(folder)
    engine = FakeEngine(make_model(str(folder)))
    options = {"max_prompt_bytes": MAX_PROMPT_BYTES, "chat_template_timeout_s": 1.0}
    with serving(engine, **options) as client:
        yield Chats(engine, client, tokenizer)


def user(content: str = "hi") -> inference_pb2.ChatMessage:
    return Message(role="user", content=content)


def test_a_chat_is_the_text_that_the_template_makes_of_it(chats: Chats) -> None:
    messages = [Message(role="system", content="Be brief."), user("The quick\nfox ก")]
    text = "<s>system: Be brief.;user: The quick\nfox ก;assistant: "
    tokens = chats.prompt(Chat(messages=messages))
    assert tokens == chats.tokens(text)
    assert tokens.count(0) == 1, "the token that begins a text is there once"
    assert chats.prompt(text="hi") == [0, *chats.tokens("hi")]


def test_tools_fields_and_arguments_come_through_as_they_were_written(chats: Chats) -> None:
    """The order of keys, and 1 beside 1.0; a content that is unset beside an empty one."""
    tools = ['{"z": 1.0, "a": [1, null, true], "ก": "\\u0e01"}', '{"name": "look"}']
    calls = '[{"id": "c1", "function": {"name": "look", "arguments": {"y": 2, "x": 2.0}}}]'
    chat = Chat(
        messages=[
            Message(role="assistant", fields=f'{{"tool_calls": {calls}}}'),
            Message(role="tool", content="", fields='{"tool_call_id": "c1"}'),
        ],
        tools=tools,
        template_arguments='{"tone": {"b": 1, "a": 1.0}}',
    )
    expected_tools = json.dumps([json.loads(tool) for tool in tools], ensure_ascii=False)
    text = (
        f"<s>tools {expected_tools};assistant: nothing calls {calls};tool: ;"
        '{"b": 1, "a": 1.0};assistant: '
    )
    assert chats.prompt(chat) == chats.tokens(text)


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "assistant: It is ;assistant: "),
        ({"add_generation_prompt": True}, "assistant: It is ;assistant: "),
        ({"add_generation_prompt": False}, "assistant: It is ;"),
        ({"continue_final_message": True}, "assistant: It is "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "assistant: It is "),
    ],
)
def test_how_a_prompt_ends(chats: Chats, options: dict[str, bool], end: str) -> None:
    messages = [user(), Message(role="assistant", content="It is ")]
    prompt = chats.prompt(Chat(messages=messages, **options))
    assert prompt == chats.tokens(f"<s>user: hi;{end}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "messages is empty: it must have at least 1 message"),
        ({"messages": [user(), Message(content="x")]}, "messages[1].role is missing: it must"),
        (
            {"messages": [user(), Message(role="user", fields="{")]},
            "messages[1].fields is no JSON: Expecting",
        ),
        (
            {"messages": [Message(role="user", fields="[1]")]},
            "messages[0].fields is a JSON list: must be an object",
        ),
        (
            {"messages": [Message(role="user", fields='{"role": "x"}')]},
            "messages[0].fields has 'role': the message's own field role sets it",
        ),
        (
            {"messages": [Message(role="user", fields='{"content": "x"}')]},
            "messages[0].fields has 'content': the message's own field content sets it",
        ),
        ({"messages": [user()], "tools": ["{}", "{x"]}, "tools[1] is no JSON: Expecting"),
        ({"messages": [user()], "tools": ["3"]}, "tools[0] is a JSON int: must be an object"),
        (
            {"messages": [user()], "template_arguments": "nonsense"},
            "template_arguments is no JSON: Expecting",
        ),
        (
            {"messages": [user()], "template_arguments": '"x"'},
            "template_arguments is a JSON str: must be an object",
        ),
        (
            {"messages": [user()], "template_arguments": "[" * 19_000},
            "template_arguments is no JSON: ",
        ),
        (
            {"messages": [user()], "template_arguments": '{"messages": []}'},
            "template_arguments.messages can't be set",
        ),
        (
            {"messages": [user()], "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt and continue_final_message are set: at most one may be",
        ),
        (
            {"messages": [user(), Message(role="assistant")]},
            "messages[1].content is missing: a message without tool_calls must have one",
        ),
        (
            {
                "messages": [Message(role="assistant", fields='{"tool_calls": [{}]}')],
                "continue_final_message": True,
            },
            "continue_final_message is set, but messages[0] has no text to continue",
        ),
        (
            {"messages": [Message(role="refused", content="x")]},
            "the chat template refuses these messages: no such role",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(
    chats: Chats, fields: dict[str, Any], message: str
) -> None:
    assert chats.refusal(Chat(**fields)).startswith(message)


def test_a_template_that_takes_too_long_holds_up_nobody_for_long(chats: Chats) -> None:
    slow = chats.client.generate(chat=Chat(messages=[Message(role="loop", content="x")]))
    assert chats.prompt(text="hi") == [0, *chats.tokens("hi")]
    code, details = status_of(slow)
    assert code == INVALID
    assert details == (
        "the chat template takes longer than chat_template_timeout_s=1 for these messages"
    )
    assert chats.prompt(Chat(messages=[user()])) == chats.tokens("<s>user: hi;assistant: ")


def test_a_chat_that_is_too_long_is_refused_by_the_limit(chats: Chats) -> None:
    chat = Chat(messages=[user("x" * (MAX_PROMPT_BYTES + 1))])
    assert chats.refusal(chat) == "chat of 20015 bytes is longer than max_prompt_bytes=20000"
    chat = Chat(messages=[Message(role="u")] * 4097)
    assert chats.refusal(chat) == "messages has 4097 entries: must be at most 4096"
    chat = Chat(messages=[user()], tools=["{}"] * 1025)
    assert chats.refusal(chat) == "tools has 1025 entries: must be at most 1024"
    chat = Chat(messages=[user("ก" * (MAX_MODEL_LEN // 3))])
    num_tokens = len(chats.tokens(f"<s>user: {'ก' * (MAX_MODEL_LEN // 3)};assistant: "))
    assert chats.refusal(chat).startswith(
        f"prompt of {num_tokens} tokens + at least 1 new is {num_tokens + 1} tokens: more than"
    )


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_the_operators_template_comes_first(tmp_path: Path, template: str | None) -> None:
    tokenizer = write_model(tmp_path / "model", template)
    path = tmp_path / "own.jinja"
    path.write_text("{{ bos_token }}{{ messages | length }} own")
    engine = FakeEngine(make_model(str(tmp_path / "model")))
    with serving(engine, chat_template=str(path)) as client:
        chats = Chats(engine, client, tokenizer)
        assert chats.prompt(Chat(messages=[user(), user()])) == chats.tokens("<s>2 own")


def test_a_model_without_a_template_takes_other_prompts(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path, None)
    engine = FakeEngine(make_model(str(tmp_path)))
    with serving(engine) as client:
        chats = Chats(engine, client, tokenizer)
        assert chats.refusal(Chat(messages=[user()])) == (
            "model tiny has no chat template, so this server can't turn messages into a prompt: "
            "send text or token_ids, or start the server with --chat-template FILE"
        )
        assert chats.prompt(text="hi") == [0, *chats.tokens("hi")]
        assert chats.prompt(token_ids=[5]) == [5]


def test_a_template_that_is_none_is_the_operators_to_mend(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path, "{% if %}")
    engine = FakeEngine(make_model(str(tmp_path)))
    with serving(engine) as client:
        chats = Chats(engine, client, tokenizer)
        code, details = status_of(client.generate(chat=Chat(messages=[user()])))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert details.startswith("the model's chat template can't be read: ")
        assert details.endswith("start the server with --chat-template FILE")
        assert chats.prompt(text="hi") == [0, *chats.tokens("hi")]


def test_a_model_without_a_tokenizer_takes_no_chat(tmp_path: Path) -> None:
    engine = FakeEngine(make_model(str(write_folder(tmp_path, TEMPLATE))))
    with serving(engine) as client:
        code, details = status_of(client.generate(chat=Chat(messages=[user()])))
        assert code == INVALID
        assert details.startswith("model tiny has no tokenizer.json")
