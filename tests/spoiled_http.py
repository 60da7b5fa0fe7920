"""What the fuzz sends to the HTTP port: bodies of each address, and bytes that are no HTTP."""

import json
import random
from typing import Any

from runtime.frontend.openai.chat_body import ChatBody
from runtime.frontend.openai.completion_body import CompletionBody
from runtime.frontend.openai.tokenizing import DetokenizeBody, TokenizeBody
from tests.frontend import API_KEY
from tests.fuzzing import mutate_bytes
from tests.openai import CHAT, COMPLETIONS, TOOL

MAX_BODY_BYTES = 64 << 10

SAMPLING = {"model": "oracle", "max_tokens": 3, "temperature": 0.5, "seed": 5, "logprobs": 1}
MESSAGES = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLS = {"tool_calls": [CALL]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, SAMPLING | {"prompt": "two words", "stop": ["x"], "logit_bias": {"5": 1.5}}),
    (COMPLETIONS, SAMPLING | {"prompt": [[3, 4], [5]], "n": 2, "echo": True, "stream": True}),
    (COMPLETIONS, {"model": "oracle", "prompt": ["a", "b"], "max_tokens": 2, "regex": "[ab]+"}),
    (COMPLETIONS, {"model": "oracle", "prompt": "a", "json_schema": {"type": "integer"}}),
    (CHAT, SAMPLING | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2}),
    (CHAT, SAMPLING | {"messages": MESSAGES, "logprobs": False, "stream": True}),
    (
        CHAT,
        {
            "model": "oracle",
            "max_tokens": 5,
            "tools": [TOOL],
            "tool_choice": "auto",
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": None} | CALLS,
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "d"}]},
            ],
        },
    ),
    (
        CHAT,
        {
            "model": "oracle",
            "max_tokens": 5,
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "boolean"}},
            },
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/tokenize", {"prompt": "two words", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"model": "oracle", "tokens": [3, 4, 5]}),
    ("/v1/responses", {"model": "oracle", "input": "a"}),
]
FIELDS = {
    COMPLETIONS: sorted(CompletionBody.names()),
    CHAT: sorted(ChatBody.names()),
    "/tokenize": sorted(TokenizeBody.names()),
    "/detokenize": sorted(DetokenizeBody.names()),
    "/v1/responses": ["input", "stream"],
}

HTTP_WORDS = (
    *(b"\r\n", b"\n", b"\r\n\r\n", b"\0", b"\xff", b" ", b"\t", b":"),
    *(b"Transfer-Encoding: chunked\r\n", b"transfer-encoding: gzip\r\n"),
    *(b"content-length: 3\r\n", b"Content-Length: -1\r\n", b"Content-Length: 9e9\r\n"),
    *(b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Host: b\r\n"),
    *(b"x: " + b"y" * 20_000 + b"\r\n", b"HTTP/9.9", b"HTTP/1.0", b"GET / HTTP/1.1\r\n\r\n"),
    *(b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"zz\r\n"),
    *(b"BREW", b"CONNECT", b"OPTIONS *", b"http://elsewhere/", b"%00", b"/../..", b"?" * 300),
)


def make_http(draw: random.Random) -> bytes:
    """A good HTTP request, or two in a row."""
    path, body = draw.choice(BODIES)
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: here", f"authorization: Bearer {API_KEY}"]
    if draw.random() < 0.3:
        parts = [content[:10], content[10:]]
        content = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        lines.append("transfer-encoding: chunked")
    else:
        lines.append(f"content-length: {len(content)}")
    if draw.random() < 0.5:
        lines.append("connection: close")
    if draw.random() < 0.3:
        lines[0], content = "GET /v1/models HTTP/1.1", b""
    request = "\r\n".join([*lines, "", ""]).encode() + content
    return request if draw.random() < 0.8 else request + make_http(draw)


def spoil_http(draw: random.Random) -> bytes:
    match draw.randrange(8):
        case 0:
            return draw.randbytes(draw.choice([1, 20, 500, 30_000]))
        case 1:
            return make_http(draw) + draw.randbytes(40)
        case 2:
            return make_http(draw)[: draw.randint(0, 300)]
        case 3:
            # Over what may wait, by a body that says so or by one that doesn't.
            size = MAX_BODY_BYTES + draw.choice([-1, 0, 1, 1000])
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: here\r\ncontent-length: {size}\r\n\r\n"
            return head.encode() + b" " * draw.choice([10, size])
        case _:
            return mutate_bytes(draw, make_http(draw), HTTP_WORDS)
