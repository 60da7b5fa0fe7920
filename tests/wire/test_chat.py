"""Chats as prompts: which template, which variables, which messages, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ConfigError, InvalidRequestError
from runtime.frontend.chat import ChatTemplate, missing_template
from tests.chats import (
    GEMMA_TEMPLATE,
    MAX_BYTES,
    assistant,
    chat_template,
    render,
    render_once,
    user,
    write_folder,
)

pytestmark = pytest.mark.wire

SPOKEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ONLY_PARTS = "{% for part in messages[-1].content %}{{ part['text'] }}|{% endfor %}"
WITH_PARTS = """\
{%- for m in messages -%}
{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};
{%- endfor -%}"""


def called(arguments: str) -> dict[str, Any]:
    """A call as OpenAI's clients send it."""
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


@pytest.fixture(scope="module")
def spoken() -> Iterator[ChatTemplate]:
    with chat_template(SPOKEN) as template:
        yield template


def load_and_render(folder: Path, override: Path | None = None, **options: Any) -> str:
    template = ChatTemplate.load(str(folder), override, max_bytes=MAX_BYTES)
    assert template is not None
    try:
        return render(template, **options)
    finally:
        template.close()


def test_a_template_of_the_tokenizer_config_knows_its_special_tokens(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ eot_token }}{{ image_token }}",
        eos_token={"__type": "AddedToken", "content": "<end>", "special": True},
        eot_token="<eot>",
        extra_special_tokens={"image_token": "<image>"},
        add_bos_token=True,
    )
    assert load_and_render(folder) == "<s>hi<end><eot><image>"


def test_special_tokens_of_a_legacy_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "{{ bos_token }}{{ pad_token }}")
    tokens = {"pad_token": {"content": "<pad>"}, "bos_token": "<other>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert load_and_render(folder) == "<s><pad>"


def test_the_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    named = {"default": "plain {{ tools }}", "tool_use": "{{ tools[0].name }}"}
    entries = [{"name": name, "template": source} for name, source in named.items()]
    folder = write_folder(tmp_path, entries)
    assert load_and_render(folder) == "plain None"
    assert load_and_render(folder, tools=[{"name": "look"}]) == "look"


def test_templates_in_files_of_their_own_come_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "config")
    (folder / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert load_and_render(folder) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert load_and_render(folder, tools=[{}]) == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("additional")
    assert load_and_render(folder) == "file"
    assert load_and_render(folder, tools=[{}]) == "additional"
    (tmp_path / "own.jinja").write_text("operator {{ bos_token }}")
    assert load_and_render(folder, tmp_path / "own.jinja", tools=[{}]) == "operator <s>"


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert load_and_render(tmp_path) == "processor"


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(str(write_folder(tmp_path)), max_bytes=9) is None
    message = str(missing_template("tiny"))
    assert "tiny has no chat template" in message
    assert "--chat-template FILE" in message


def test_templates_without_a_default_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, [{"name": "tool_use", "template": "x"}])
    assert load_and_render(folder, tools=[{}]) == "x"
    with pytest.raises(ConfigError, match="templates are tool_use, and none is default"):
        load_and_render(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"tokenizer_config\.json: Expecting"),
        ("[]", r"tokenizer_config\.json holds a list: must be an object"),
        ('{"chat_template": 3}', "must be a text or a list of name and template"),
        ('{"chat_template": [{"name": "x"}]}', "must be a text or a list of name and template"),
        ('{"chat_template": [{"name": "x", "template": 1}]}', "must be texts"),
    ],
)
def test_a_broken_file_of_the_model_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        ChatTemplate.load(str(tmp_path), max_bytes=9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\n{% if %}", "broken.jinja: line 2: Expected an expression"),
        (b"{{ messages | nofilter }}", "broken.jinja: line 1: No filter named 'nofilter'"),
        (b"\xff", "broken.jinja: 'utf-8' codec can't decode"),
        (None, "broken.jinja: .*No such file"),
    ],
)
def test_a_broken_file_of_the_operator_is_told_at_once(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "broken.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ChatTemplate.load(str(tmp_path), path, max_bytes=9)


def test_a_broken_template_of_the_model_is_told_by_the_first_chat(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read: line 1: .*--chat-template FILE"):
        load_and_render(write_folder(tmp_path, "{% endif %}"))


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is of type str: must be an object"),
        ([user(), {"content": "x"}], r"messages\[1\]\.role is missing"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role is missing"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role is of type int: must be str"),
        ([user(), user(None)], r"messages\[1\]\.content is missing"),
        ([user() | {"tool_calls": []} | {"content": None}], r"messages\[0\]\.content is missing"),
        ([user(7)], r"messages\[0\]\.content is of type int: must be a text or a list"),
        ([user(["x"])], r"messages\[0\]\.content\[0\] is of type str: must be an object"),
        ([user([{"text": "x"}])], r"content\[0\]\.type=None can't be served: must be 'text'"),
        ([user([{"type": "image_url"}])], r"content\[0\]\.type='image_url' can't be served"),
        ([user([{"type": "text"}])], r"content\[0\]\.text is of type NoneType: must be str"),
        ([user() | {"tool_calls": {}}], r"messages\[0\]\.tool_calls is of type dict"),
        ([user() | {"tool_calls": ["x"]}], r"messages\[0\]\.tool_calls\[0\] is of type str"),
    ],
)
def test_a_wrong_message_is_refused_by_its_field(
    spoken: ChatTemplate, messages: list[object], where: str
) -> None:
    with pytest.raises(InvalidRequestError, match=where):
        render(spoken, messages)


def test_tools_and_arguments_are_checked(spoken: ChatTemplate) -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\[1\] is of type int: must be an object"):
        render(spoken, tools=[{}, 3])
    with pytest.raises(InvalidRequestError, match=r"template_arguments\.messages can't be set"):
        render(spoken, arguments={"messages": []})
    with pytest.raises(InvalidRequestError, match=r"no JSON: .*complex is not JSON serializable"):
        render(spoken, arguments={"x": 1j})


def test_a_call_of_a_tool_needs_no_content() -> None:
    calls = [{"function": {"name": "look", "arguments": {"far": True}}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    source = "{{ messages[0].content is defined }} {{ messages[0].tool_calls | tojson }}"
    assert render_once(source, [message]) == f"False {json.dumps(calls)}"


def test_arguments_of_a_call_that_are_a_text_become_its_object() -> None:
    message = called('{"z": 1.0, "a": [null, "\\u00fc"]}')
    before = json.dumps(message)
    source = "{{ messages[0].tool_calls[0].function.arguments.z }} "
    source += "{{ messages[0].tool_calls | tojson }}"
    function = {"name": "look", "arguments": {"z": 1.0, "a": [None, "ü"]}}
    expected = json.dumps([{"id": "c", "function": function}], ensure_ascii=False)
    assert render_once(source, [message]) == f"1.0 {expected}"
    assert json.dumps(message) == before


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ('{"a": ', r'"{\"a\": "'),
        ("[1]", '"[1]"'),
        ("null", '"null"'),
        ("[" * 99_999, '"' + "[" * 99_999 + '"'),
    ],
)
def test_arguments_that_are_no_object_stay_what_the_model_wrote(arguments: str, shown: str) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render_once(source, [called(arguments)]) == shown


def test_developers_are_the_system_where_the_template_does_not_know_them() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, user()]
    assert render_once(SPOKEN, messages) == "system: Be brief.\nuser: hi\n"
    knowing = "{# developer #}" + SPOKEN
    assert render_once(knowing, messages) == "developer: Be brief.\nuser: hi\n"


def test_the_source_of_the_template_that_is_taken(tmp_path: Path) -> None:
    named = {"default": "plain", "tool_use": "with tools"}
    entries = [{"name": name, "template": source} for name, source in named.items()]
    template = ChatTemplate.load(str(write_folder(tmp_path, entries)), max_bytes=9)
    assert template is not None
    assert template.source(has_tools=False) == "plain"
    assert template.source(has_tools=True) == "with tools"
    template.close()


def test_arguments_are_variables_of_the_template() -> None:
    source = "{{ self_ }}{{ bos_token }}{{ documents }}{{ add_generation_prompt }}"
    arguments = {"self_": 1, "self": 2, "bos_token": "<b>", "documents": ["d"]}
    assert render_once(source, arguments=arguments) == "1<b>['d']True"
    assert render_once(source, add_generation_prompt=False) == "<s>NoneFalse"


def test_parts_are_joined_where_the_template_knows_texts_alone(spoken: ChatTemplate) -> None:
    parts = [{"type": "text", "text": text} for text in ("one ", "two")]
    assert render(spoken, [user(parts), assistant()]) == "user: one two\nassistant: hello\n"
    assert render_once("{{ messages | tojson }}", [user(parts)]) == json.dumps([user("one two")])
    failing = "{{ messages[0].content + '!' }}"
    assert render_once(failing, [user(parts)]) == "one two!"


def test_parts_are_given_as_they_are_where_the_template_knows_them() -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    assert render_once(ONLY_PARTS, [user(parts)]) == "one|two|"
    alike = "{{ messages[0].content if messages[0].content is string else "
    alike += "messages[0].content | map(attribute='text') | join('+') }}"
    assert render_once(alike, [user(parts)]) == "one+two"


def test_a_template_that_writes_parts_otherwise_than_texts_gets_texts() -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    assert render_once(WITH_PARTS, [user(parts)]) == "user: onetwo;"


@pytest.mark.parametrize("text", ["It is", "It is ", "It is\n", " spaced", "a\u0301"])
def test_the_answer_goes_on_with_the_last_message(text: str) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    whole = render_once(SPOKEN, [user(), assistant(text)], **options)
    assert whole == f"user: hi\nassistant: {text}"
    trimming = SPOKEN.replace("m.content", "m.content | trim")
    whole = render_once(trimming, [user(), assistant(text)], **options)
    assert whole == f"user: hi\nassistant: {text.strip()}"


def test_the_answer_goes_on_with_the_last_part() -> None:
    parts = [{"type": "text", "text": text} for text in ("one ", "two")]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render_once(SPOKEN, [assistant(parts)], **options) == "assistant: one two"
    assert render_once(ONLY_PARTS, [assistant(parts)], **options) == "one |two"


@pytest.mark.parametrize(
    ("source", "last", "message"),
    [
        (SPOKEN, {"role": "a", "tool_calls": [{}]}, r"messages\[1\] has no text to continue"),
        (ONLY_PARTS, assistant([]), r"messages\[1\] has no text to continue"),
        ("nothing", assistant(), "doesn't write the last message's text as it is"),
        ("{{ messages[1].content | upper }}", assistant(), "doesn't write the last message's text"),
    ],
)
def test_an_answer_that_can_not_go_on(source: str, last: dict[str, Any], message: str) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(InvalidRequestError, match=message):
        render_once(source, [user(), last], **options)


def test_an_answer_either_begins_or_goes_on(spoken: ChatTemplate) -> None:
    with pytest.raises(InvalidRequestError, match="at most one may be"):
        render(spoken, continue_final_message=True)


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_comes_through(spoken: ChatTemplate, text: str) -> None:
    assert render(spoken, [user(text)]) == f"user: {text}\n"


def test_the_templates_are_in_a_sandbox() -> None:
    for source in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{% include '/etc/passwd' %}",
    ):
        with pytest.raises(InvalidRequestError, match="the chat template can't render these"):
            render_once(source)


def test_the_template_says_why_it_refuses() -> None:
    with pytest.raises(InvalidRequestError, match=r"refuses these messages: roles must alternate$"):
        render_once("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match=r"can't render .*'nothing' is undefined"):
        render_once("{{ nothing.more }}")
    with pytest.raises(InvalidRequestError, match="ZeroDivisionError"):
        render_once("{{ 1 / messages[0].zero }}", [user() | {"zero": 0}])


def test_the_example_for_the_embedded_model() -> None:
    source = GEMMA_TEMPLATE.read_text()
    system = {"role": "system", "content": " Be brief.\n"}
    assert render_once(source, [system, user(" a "), assistant("b"), user("c")]) == (
        "<s><start_of_turn>user\nBe brief.\n\na<end_of_turn>\n"
        "<start_of_turn>model\nb<end_of_turn>\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(InvalidRequestError, match="alternate, user first: expected assistant"):
        render_once(source, [user(), user()])
    with pytest.raises(InvalidRequestError, match="a system message must come first"):
        render_once(source, [user(), system])
