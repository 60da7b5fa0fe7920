"""The process that renders chats: what a template can't do to the frontend."""

import asyncio
import json
import os
import select
import subprocess
import sys
from typing import Any

import psutil
import pytest

from runtime.errors import ConfigError, InvalidRequestError, UnavailableError
from runtime.frontend import chat_process
from runtime.frontend.chat import ChatTemplate
from tests.chats import TIMEOUT_S, chat_template, render, render_once, user
from tests.quick import quick

pytestmark = pytest.mark.wire

# What a template does is in the first message.
PROGRAM = """\
{%- set order = messages[0].content -%}
{%- if order == 'loop' -%}
  {%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif order == 'power' -%}
  {{ (9 ** (messages[0].nine ** 9)) % 2 }}
{%- elif order == 'fill' -%}
  {{ ('x' * (messages[0].nine * 10 ** 9)) | length }}
{%- elif order == 'collect' -%}
  {%- set all = namespace(text='x') -%}
  {%- for a in range(99999) -%}{%- set all.text = all.text ~ all.text -%}{%- endfor -%}
{%- elif order == 'write' -%}
  {%- for a in range(99999) -%}{%- for b in range(99999) -%}x{%- endfor -%}{%- endfor -%}
{%- elif order == 'recurse' -%}
  {%- macro again() -%}{{ again() }}{%- endmacro -%}{{ again() }}
{%- endif -%}
done: {{ order }}"""


def ordered(order: str) -> list[dict[str, Any]]:
    return [user(order) | {"nine": 9}]


def process_of(template: ChatTemplate) -> psutil.Process:
    process = template._process._process
    assert process is not None
    return psutil.Process(process.pid)


@pytest.mark.parametrize("order", quick(["loop", "power"], "loop"))
def test_a_template_that_does_not_end_is_killed(order: str) -> None:
    with chat_template(PROGRAM) as template:
        render(template)
        process = process_of(template)
        with pytest.raises(InvalidRequestError, match=r"longer than chat_template_timeout_s=0\.2"):
            render(template, ordered(order), timeout_s=0.2)
        assert not process.is_running()
        assert render(template, ordered("next")) == "done: next"


@pytest.mark.parametrize("order", ["fill", "collect"])
def test_a_template_that_fills_the_memory_fails_alone(order: str) -> None:
    with chat_template(PROGRAM) as template:
        with pytest.raises(InvalidRequestError, match="needs more than 1073741824 bytes of memory"):
            render(template, ordered(order))
        assert render(template, ordered("next")) == "done: next"


def test_a_template_that_writes_too_much_is_stopped() -> None:
    with chat_template(PROGRAM, max_bytes=1000) as template:
        with pytest.raises(InvalidRequestError, match="longer than max_prompt_bytes=1000"):
            render(template, ordered("write"))
        process = process_of(template)
        assert render(template, ordered("x" * 994)) == "done: " + "x" * 994
        with pytest.raises(InvalidRequestError, match="longer than max_prompt_bytes=1000"):
            render(template, ordered("x" * 995))
        with pytest.raises(InvalidRequestError, match="longer than max_prompt_bytes=1000"):
            render(template, ordered("é" * 498))
        assert render(template, ordered("\0" * 994)) == "done: " + "\0" * 994
        assert process_of(template) == process, (
            "a text that is too long is no reason to start again"
        )


def test_a_template_that_calls_itself_fails() -> None:
    with pytest.raises(InvalidRequestError, match="can't render these messages: RecursionError"):
        render_once(PROGRAM, ordered("recurse"))


def test_reading_a_template_has_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_process, "START_TIMEOUT_S", 1.0)
    with pytest.raises(ConfigError, match="can't be read: reading it took longer than 1 s"):
        render_once("{{ 9 ** (9 ** 9) }}")


def test_messages_nested_too_deeply_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidRequestError, match="the chat template can't"):
        render_once(PROGRAM, arguments={"nested": nested})


def test_one_process_serves_all_chats_until_it_is_closed() -> None:
    async def render_many(template: ChatTemplate) -> list[str]:
        chats = [template.render(ordered(str(i)), timeout_s=TIMEOUT_S) for i in range(50)]
        return await asyncio.gather(*chats)

    with chat_template(PROGRAM) as template:
        assert template._process._process is None, "nothing runs before the first chat"
        render(template)
        process = process_of(template)
        assert asyncio.run(render_many(template)) == [f"done: {i}" for i in range(50)]
        assert process_of(template) == process
    assert not process.is_running()


def test_a_process_that_was_killed_while_idle_is_started_again() -> None:
    with chat_template(PROGRAM) as template:
        render(template)
        process = process_of(template)
        process.kill()
        process.wait(TIMEOUT_S)
        assert render(template) == "done: hi"


def test_a_process_that_is_killed_at_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_template(PROGRAM) as template:
        render(template)
        exchange = chat_process._exchange

        def kill_first(process: "subprocess.Popen[bytes]", *rest: Any) -> bytes:
            process.kill()
            return exchange(process, *rest)

        monkeypatch.setattr(chat_process, "_exchange", kill_first)
        with pytest.raises(UnavailableError, match="renders chats ended: killed by signal 9"):
            render(template)
        monkeypatch.undo()
        assert render(template) == "done: hi"


def test_who_leaves_does_not_disturb_the_others() -> None:
    async def leave_and_render(template: ChatTemplate) -> str:
        leaving = asyncio.ensure_future(template.render(ordered("loop"), timeout_s=0.3))
        waiting = asyncio.ensure_future(template.render(ordered("never"), timeout_s=TIMEOUT_S))
        staying = asyncio.ensure_future(template.render(ordered("stays"), timeout_s=TIMEOUT_S))
        await asyncio.sleep(0)  # all of them have begun
        leaving.cancel()
        waiting.cancel()
        await asyncio.wait([leaving, waiting])
        assert leaving.cancelled()
        assert waiting.cancelled()
        return await staying

    with chat_template(PROGRAM) as template:
        assert asyncio.run(leave_and_render(template)) == "done: stays"


def test_closing_ends_a_chat_that_is_being_rendered() -> None:
    async def close_while_rendering(template: ChatTemplate) -> None:
        rendering = asyncio.ensure_future(template.render(ordered("loop"), timeout_s=TIMEOUT_S))
        await asyncio.sleep(0)
        template.close()
        with pytest.raises(UnavailableError, match="the process that renders chats ended"):
            await rendering

    with chat_template(PROGRAM) as template:
        render(template)
        process = process_of(template)
        asyncio.run(close_while_rendering(template))
        assert not process.is_running()
        with pytest.raises(UnavailableError, match="the frontend ends"):
            render(template)


FRONTEND = """
import sys
from runtime.frontend import chat_process
from tests.chats import chat_template, render
from tests.wire.test_chat_process import PROGRAM, ordered, process_of

def exchange(process, question, max_reply_bytes):
    process.stdin.write(question)
    process.stdin.flush()
    print("asked", flush=True)
    return process.stdout.readline(max_reply_bytes)

with chat_template(PROGRAM) as template:
    render(template)
    print(process_of(template).pid, flush=True)
    chat_process._exchange = exchange
    order = sys.stdin.readline().strip()
    render(template, ordered(order), timeout_s=0.2)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("order", quick(["loop", "power", "idle"], "loop", "idle"))
def test_no_orphan_stays_behind_a_frontend_that_is_killed(order: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FRONTEND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as frontend:
        assert frontend.stdin is not None
        assert frontend.stdout is not None
        # Readable when the process has ended, whether or not its new parent has waited for it.
        child = os.pidfd_open(int(frontend.stdout.readline()))
        frontend.stdin.write(f"{order}\n")
        frontend.stdin.flush()
        assert frontend.stdout.readline() == "asked\n"
        frontend.kill()
    ended, _, _ = select.select([child], [], [], TIMEOUT_S)
    os.close(child)
    assert ended


def test_no_key_is_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    with chat_template("{{ strftime_now('%Z %Y')[:2] }}") as template:
        render(template)
        environment = process_of(template).environ()
    assert environment["TZ"] == "UTC"
    assert not any("secret" in value for value in environment.values())


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("chat_child", ["torch", "transformers", "numpy", "grpc", "tokenizers", "asyncio"]),
        ("chat", ["torch", "transformers", "numpy", "jinja2"]),
        ("output_text", ["torch", "transformers", "numpy", "jinja2"]),
    ],
)
def test_what_is_imported(module: str, without: list[str]) -> None:
    program = f"import json, sys, runtime.frontend.{module}; print(json.dumps(list(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert set(json.loads(output.stdout)).isdisjoint(without)
