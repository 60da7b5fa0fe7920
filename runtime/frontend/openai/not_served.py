"""Parts of OpenAI's API that aren't here, and what to use instead."""

from runtime.frontend.openai.errors import NotFoundError

_CHAT = "use /v1/chat/completions"
_NO_OTHER = "this server generates text alone"
# By how their addresses begin.
INSTEAD = {
    "/v1/responses": _CHAT,
    "/v1/assistants": _CHAT,
    "/v1/threads": _CHAT,
    "/v1/conversations": _CHAT,
    "/v1/realtime": _CHAT,
    "/v1/edits": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/batches": "use the command `lockstep batch input.jsonl output.jsonl`",
    "/v1/files": "use the command `lockstep batch input.jsonl output.jsonl`",
    "/v1/uploads": "use the command `lockstep batch input.jsonl output.jsonl`",
    "/v1/embeddings": _NO_OTHER,
    "/v1/moderations": _NO_OTHER,
    "/v1/audio": _NO_OTHER,
    "/v1/images": _NO_OTHER,
    "/v1/videos": _NO_OTHER,
    "/v1/fine_tuning": _NO_OTHER,
    "/v1/vector_stores": _NO_OTHER,
    "/v1/evals": _NO_OTHER,
    "/v1/containers": _NO_OTHER,
    "/v1/tokenize": "use /tokenize",
    "/v1/detokenize": "use /detokenize",
    "/chat/completions": _CHAT,
    "/completions": "use /v1/completions",
    "/models": "use /v1/models",
}


def unknown_address(path: str) -> NotFoundError:
    """What to tell who asks for an address that isn't here."""
    shown = path[:80]
    for prefix, instead in INSTEAD.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return NotFoundError(f"{shown} isn't served: {instead}", code="not_served")
    return NotFoundError(f"{shown!r} is no address of this server", code="unknown_url")
