"""Renders chats in a process of its own, which may be killed at any moment. Knows jinja2 alone.

A template is a program that came with a model: it can loop for ever and fill the memory. This
process bounds its own memory, and asks the kernel for an alarm, which ends it even where Python is
stuck in one operation and whoever started it is gone. Each line of standard input is a question,
each line of standard output its answer, both in JSON; the process ends with its input.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_MESSAGE_CHARS = 1000
# What a template that reads lists of parts shows of one, and one that doesn't.
PROBE = "probe0123456789"
MAX_PROBE_BYTES = 1 << 20


class TooLongError(Exception):
    """The text is longer than the question allows."""


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks answers for training, here plain text."""

    tags = {"generation"}  # noqa: RUF012 (the base class's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PublicNamespace(Namespace):
    """Without names that begin with an underscore, by which Python knows an object's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Namespace's own way to allow an attribute called self.
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class Renderer:
    """Templates by name, in the environment that transformers gives them."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """Raises TemplateSyntaxError: a source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        environment.globals["namespace"] = PublicNamespace
        self._templates = {name: environment.from_string(text) for name, text in sources.items()}

    def render(self, name: str, variables: Mapping[str, Any], max_bytes: int) -> str:
        """Raises whatever the template raises, and TooLongError."""
        pieces: list[str] = []
        num_chars = 0
        for piece in self._templates[name].generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_bytes:  # at once: the template may never end
                raise TooLongError
        text = "".join(pieces)
        if len(text.encode(errors="surrogatepass")) > max_bytes:
            raise TooLongError
        return text

    def takes_parts(self, name: str, variables: Mapping[str, Any]) -> bool:
        """Whether the template reads contents that are lists of parts; most know texts alone."""
        as_parts = self._probe(name, variables, [{"type": "text", "text": PROBE}])
        as_text = self._probe(name, variables, PROBE)
        # One that shows the list itself shows more than the text.
        return PROBE in as_parts and (as_parts == as_text or PROBE not in as_text)

    def _probe(self, name: str, variables: Mapping[str, Any], content: object) -> str:
        messages = [{"role": "user", "content": content}]
        try:
            return self.render(name, {**variables, "messages": messages}, MAX_PROBE_BYTES)
        except Exception:  # a template may raise anything, and may want more than one message
            return ""


def start(templates: Mapping[str, str]) -> tuple[Renderer | None, dict[str, Any]]:
    """The renderer of the templates, if they are any, and what to answer."""
    try:
        return Renderer(templates), {}
    except TemplateSyntaxError as error:
        return None, {"error": "broken", "message": f"line {error.lineno}: {_describe(error)}"}
    except Exception as error:  # constants are computed when a template is read
        message = f"{type(error).__name__}: {_describe(error)}"
        return None, {"error": "broken", "message": message}


def answer(renderer: Renderer, question: Mapping[str, Any]) -> dict[str, Any]:
    """What the template makes of the question's variables, or why it makes nothing."""
    name, variables = question["name"], question["variables"]
    try:
        if question["probe"]:
            return {"takes_parts": renderer.takes_parts(name, variables)}
        return {"text": renderer.render(name, variables, question["max_bytes"])}
    except TooLongError:
        return {"error": "too_long"}
    except MemoryError:
        return {"error": "memory"}
    except TemplateError as error:
        # This class itself is what raise_exception raises.
        kind = "refused" if type(error) is TemplateError else "failed"
        return {"error": kind, "message": _describe(error)}
    except Exception as error:  # a template may raise anything
        return {"error": "failed", "message": f"{type(error).__name__}: {_describe(error)}"}


def main() -> None:
    _bound_memory(int(sys.argv[1]))
    for number in (signal.SIGALRM, signal.SIGPIPE):  # Python's own handlers need Python to run
        signal.signal(number, signal.SIG_DFL)
    renderer: Renderer | None = None
    for line in sys.stdin.buffer:
        try:
            question = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, question["alarm_s"])
            if renderer is None:
                renderer, reply = start(question["templates"])
            else:
                reply = answer(renderer, question)
            encoded = _encode(reply)
        except MemoryError:  # for reading or writing a line
            encoded = _encode({"error": "memory"})
        except RecursionError:
            encoded = _encode({"error": "failed", "message": "they are nested too deeply"})
        sys.stdout.buffer.write(encoded)
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _encode(reply: Mapping[str, Any]) -> bytes:
    return json.dumps(reply, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def _bound_memory(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _describe(error: Exception) -> str:
    return str(error)[:MAX_MESSAGE_CHARS]


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't have {name!r}: it begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes what HTML would read as markup.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main()
