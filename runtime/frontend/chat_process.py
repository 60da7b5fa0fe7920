"""The process that renders chats, as its frontend sees it: started for use, killed when late."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from runtime.child_environment import child_environment

MAX_MEMORY_BYTES = 1 << 30
START_TIMEOUT_S = 30.0
# Its own alarm, for when we are gone: later than ours, which says more.
ALARM_MARGIN_S = 1.0
MAX_OVERHEAD_BYTES = 64 << 10
# As JSON, a control character of one byte takes six.
MAX_ESCAPE = 6


class Fault(StrEnum):
    """Why there is no text."""

    BROKEN = "broken"  # the source is no template
    REFUSED = "refused"  # the template says so
    FAILED = "failed"  # the template ran into an error
    TOO_LONG = "too_long"
    MEMORY = "memory"
    NOT_JSON = "not_json"  # the variables can't be sent
    TIMEOUT = "timeout"
    DIED = "died"


class RenderError(Exception):
    """A chat that could not be rendered; `message` is the template's own, if it has one."""

    def __init__(self, fault: Fault, message: str = "") -> None:
        super().__init__(fault, message)
        self.fault = fault
        self.message = message


class RenderProcess:
    """Renders with a set of templates. Blocks; for one thread, but for `close`.

    The process is started by the first call, used as long as it behaves, and started again by the
    call after one that it did not survive. It ends with this one: at once where it is idle, by
    its alarm where a template runs.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        """`variables` are those that every chat has."""
        self._templates = templates
        self._variables = variables
        self._takes_parts: dict[str, bool] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process, unless it runs. Raises RenderError: a source is no template."""
        if self._process is not None and self._process.poll() is not None:
            self.end()  # while it was idle, for reasons of its own
        if self._process is None:
            self._launch()
            self._read_templates()

    def takes_parts(self, name: str, variables: Mapping[str, Any], *, timeout_s: float) -> bool:
        """Whether template `name` reads contents that are lists of parts. Raises as `render`."""
        if name not in self._takes_parts:
            question = self._question(name, variables, timeout_s) | {"probe": True}
            reply = self._start_and_ask(question, timeout_s, MAX_OVERHEAD_BYTES)
            self._takes_parts[name] = reply["takes_parts"]
        return self._takes_parts[name]

    def render(
        self, name: str, variables: Mapping[str, Any], *, timeout_s: float, max_bytes: int
    ) -> str:
        """The chat as text of at most `max_bytes` in UTF-8.

        Raises RenderError.
        """
        question = self._question(name, variables, timeout_s) | {"max_bytes": max_bytes}
        max_reply_bytes = MAX_ESCAPE * max_bytes + MAX_OVERHEAD_BYTES
        text = self._start_and_ask(question, timeout_s, max_reply_bytes)["text"]
        assert isinstance(text, str)
        return text

    def close(self) -> None:
        """Ends the process, and with it what it renders. May be called on any thread, and again."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """Kills the process, if there is one, and waits for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # a question that nobody will read
            process.stdin.close()
        process.wait()

    def _launch(self) -> None:
        with self._lock:
            if self._closed:
                raise RenderError(Fault.DIED, "the frontend ends")
            self._process = subprocess.Popen(
                # -P: a folder called `runtime` in the current directory must not be taken for ours.
                [sys.executable, "-P", "-m", "runtime.frontend.chat_child", str(MAX_MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,  # the terminal's Ctrl-C is ours to act on
            )

    def _read_templates(self) -> None:
        question = {
            "templates": dict(self._templates),
            "alarm_s": START_TIMEOUT_S + ALARM_MARGIN_S,
        }
        try:
            self._ask(_encode(question), START_TIMEOUT_S, MAX_OVERHEAD_BYTES)
        except RenderError as error:
            if error.fault is not Fault.TIMEOUT:
                raise
            message = f"reading it took longer than {START_TIMEOUT_S:g} s"
            raise RenderError(Fault.BROKEN, message) from error

    def _question(
        self, name: str, variables: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        return {
            "name": name,
            "variables": {**self._variables, **variables},
            "probe": False,
            "alarm_s": timeout_s + ALARM_MARGIN_S,
        }

    def _start_and_ask(
        self, question: Mapping[str, Any], timeout_s: float, max_reply_bytes: int
    ) -> dict[str, Any]:
        try:
            encoded = _encode(question)
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderError(Fault.NOT_JSON, str(error)) from error
        self.start()
        return self._ask(encoded, timeout_s, max_reply_bytes)

    def _ask(self, question: bytes, timeout_s: float, max_reply_bytes: int) -> dict[str, Any]:
        """The answer. The process doesn't outlive one that is late, missing or too long."""
        process = self._process
        assert process is not None
        late = threading.Event()

        def end_late() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout_s, end_late)
        timer.daemon = True
        timer.start()
        try:
            line = _exchange(process, question, max_reply_bytes)
        except BaseException:
            self.end()  # nobody knows what it would answer next
            raise
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():
            self.end()
            raise RenderError(Fault.TIMEOUT)
        if not line.endswith(b"\n"):
            self.end()
            raise RenderError(Fault.DIED, _describe(process.returncode))
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            fault = Fault(reply["error"])
            if fault in (Fault.MEMORY, Fault.BROKEN):
                self.end()
            raise RenderError(fault, reply.get("message", ""))
        return reply


def _encode(question: Mapping[str, Any]) -> bytes:
    return json.dumps(question, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def _exchange(process: "subprocess.Popen[bytes]", question: bytes, max_reply_bytes: int) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline(max_reply_bytes)


def _describe(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
