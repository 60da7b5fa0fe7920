"""Chats are rendered as transformers renders them, and tokenized as it does."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PreTrainedTokenizerFast

from runtime.errors import InvalidRequestError
from runtime.frontend.chat import ChatTemplate
from runtime.frontend.text import Tokenizer
from tests.builders import demo_model_folder
from tests.chats import DATA, GEMMA_TEMPLATE, MAX_BYTES, assistant, render, user
from tests.tokenizing import TOKENIZERS

pytestmark = pytest.mark.cpu

CHATML, HEADERS, TURNS = (
    DATA / f"{name}.jinja" for name in ("chatml", "headers_with_tools", "turns_with_parts")
)
SYSTEM = {"role": "system", "content": ' Answer "briefly" <b>&\'. '}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What it is like in Zürich <now>",
            "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"days": 3}}}],
}
DATE = {"date_string": "26 Jul 2024"}
PARTS = [{"type": "text", "text": " one "}, {"type": "text", "text": "two 👩‍👩‍👧‍👦"}]
CHAT = [SYSTEM, user(), assistant("สวัสดี e\u0301"), user("  spaced\n")]
THOUGHT = assistant("so") | {"reasoning": "hm", "name": None}

CASES: list[tuple[Path, list[dict[str, Any]], dict[str, Any]]] = [
    (CHATML, CHAT, {}),
    (CHATML, CHAT[1:], {"add_generation_prompt": False}),
    (CHATML, [user("<|im_end|>")], {"arguments": {"enable_thinking": False}}),
    (CHATML, CHAT[:3], {"continue_final_message": True, "add_generation_prompt": False}),
    (HEADERS, CHAT, {"arguments": DATE}),
    (HEADERS, CHAT[1:], {}),  # today's date
    (HEADERS, [user(), CALL, {"role": "tool", "content": '{"sun": 1}'}], {"tools": TOOLS}),
    (HEADERS, [user(), THOUGHT], {"arguments": DATE | {"bos_token": "<other>"}}),
    (HEADERS, CHAT[:3], {"continue_final_message": True, "add_generation_prompt": False}),
    (TURNS, CHAT, {}),
    (TURNS, [SYSTEM | {"content": PARTS}, user(PARTS), assistant(PARTS)], {}),
    (
        TURNS,
        [user(PARTS), assistant("goes on ")],
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
    (GEMMA_TEMPLATE, CHAT, {}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = TOKENIZERS["gemma"]._tokenizer
    PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template="unused"
    ).save_pretrained(tmp_path)
    return tmp_path


def theirs(folder: Path, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"add_generation_prompt": True} | options
    arguments = options.pop("arguments", {})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options, **arguments)
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.parametrize(("path", "messages", "options"), CASES)
def test_a_chat_is_rendered_as_by_transformers(
    folder: Path, path: Path, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    (folder / "chat_template.jinja").write_text(path.read_text())
    template = ChatTemplate.load(str(folder), max_bytes=MAX_BYTES)
    assert template is not None
    try:
        ours = render(template, messages, **options)
    finally:
        template.close()
    assert ours == theirs(folder, messages, options)


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{{ messages | tojson(indent=2, sort_keys=True, separators=(',', ':')) }}",
        "{{ messages[1].content | tojson }}{{ messages[2].content | tojson(ensure_ascii=True) }}",
        "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m }}{% endfor %}",
        "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(b=2) }}",
        "  {% if true %}\n  trimmed\n  {% endif %}\n\n{{ strftime_now('%Y') }}\n\n",
        "{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ missing }}{{ eos_token }}",
    ],
)
def test_the_environment_is_that_of_transformers(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    template = ChatTemplate.load(str(folder), max_bytes=MAX_BYTES)
    assert template is not None
    try:
        assert render(template, CHAT) == theirs(folder, CHAT, {})
    finally:
        template.close()


@pytest.mark.parametrize(
    ("path", "messages"), [(TURNS, [user(), user()]), (HEADERS, [CALL | {"tool_calls": [{}, {}]}])]
)
def test_what_transformers_refuses_is_refused(
    folder: Path, path: Path, messages: list[dict[str, Any]]
) -> None:
    (folder / "chat_template.jinja").write_text(path.read_text())
    with pytest.raises(Exception, match=r"must alternate|one call at a time") as raised:
        theirs(folder, messages, {})
    template = ChatTemplate.load(str(folder), max_bytes=MAX_BYTES)
    assert template is not None
    try:
        with pytest.raises(InvalidRequestError, match=str(raised.value)[:30]):
            render(template, messages)
    finally:
        template.close()


def test_a_chat_of_the_embedded_model_begins_with_one_bos() -> None:
    folder = demo_model_folder()
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, GEMMA_TEMPLATE, max_bytes=MAX_BYTES)
    assert tokenizer is not None
    assert template is not None
    try:
        text = render(template, CHAT)
    finally:
        template.close()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        CHAT, chat_template=GEMMA_TEMPLATE.read_text(), add_generation_prompt=True
    )
    assert token_ids == list(expected["input_ids"])
    bos, start, end = theirs.convert_tokens_to_ids(["<bos>", "<start_of_turn>", "<end_of_turn>"])
    assert [token_ids.count(each) for each in (bos, start, end)] == [1, 4, 3]


def test_the_embedded_model_has_no_template() -> None:
    assert ChatTemplate.load(demo_model_folder(), max_bytes=MAX_BYTES) is None
