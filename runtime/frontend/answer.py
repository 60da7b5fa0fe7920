"""Between the public protobuf messages and what the frontend makes of them."""

import json
from collections.abc import Iterable
from typing import Any

from protos import inference_pb2
from runtime.engine_codec import refuse_unknown_fields
from runtime.errors import InvalidRequestError
from runtime.frontend.generator import Delta, TextStream
from runtime.frontend.prompts import Chat, check_chat_size
from runtime.frontend.resume import Resume, check_size
from runtime.frontend.text import Tokenizer
from runtime.request import TokenLogprobs


class Answer:
    """Turns what a request's choices bring into the messages of its stream."""

    def __init__(
        self, request_id: str, stream: TextStream, tokenizer: Tokenizer | None, fingerprint: str
    ) -> None:
        """`request_id` is the client's label; without a tokenizer messages carry no text."""
        self._request_id = request_id
        self._stream = stream
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._is_first = True
        self._begun: set[int] = set()  # choices whose seeds are told

    def message(self, delta: Delta | None) -> inference_pb2.GenerateResponse:
        """The next message; without a delta the last one, of a stream that had nothing to add."""
        response = inference_pb2.GenerateResponse(request_id=self._request_id)
        if self._is_first:
            self._is_first = False
            response.prompt_token_ids.extend(self._stream.prompt)
            response.model_fingerprint = self._fingerprint
            response.resume_proof = self._stream.resume_proof
        if delta is not None:
            self._fill(response, delta)
        if self._stream.is_complete:
            response.usage.num_prompt_tokens = self._stream.usage.num_prompt_tokens
            response.usage.num_output_tokens = self._stream.usage.num_output_tokens
            response.usage.num_cached_tokens = self._stream.usage.num_cached_tokens
        return response

    def _fill(self, response: inference_pb2.GenerateResponse, delta: Delta) -> None:
        response.index = delta.index
        response.text = delta.text
        response.token_ids.extend(delta.token_ids)
        response.finish_reason = delta.finish_reason or 0  # type: ignore[assignment]
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            response.seed = self._stream.seed_of(delta.index)
        pairs = zip(delta.token_ids, delta.logprobs, strict=False)  # none, where not wanted
        response.logprobs.extend(self._entries(pairs))
        response.prompt_logprobs.extend(self._entries(delta.scores))
        match delta.stop:
            case str():
                response.stop_string = delta.stop
            case int():
                response.stop_token_id = delta.stop

    def _entries(
        self, pairs: Iterable[tuple[int, TokenLogprobs | None]]
    ) -> Iterable[inference_pb2.TokenLogprob]:
        for token_id, entry in pairs:
            message = self._token(token_id)
            if entry is not None:
                message.logprob = entry.logprob
                for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
                    top = self._token(top_id)
                    message.top.add(
                        token_id=top_id, text=top.text, token_bytes=top.token_bytes, logprob=logprob
                    )
            yield message

    def _token(self, token_id: int) -> inference_pb2.TokenLogprob:
        data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        text = data.decode(errors="replace")
        return inference_pb2.TokenLogprob(token_id=token_id, text=text, token_bytes=data)


def decode_resume(message: inference_pb2.Resume) -> Resume:
    """Raises InvalidRequestError: it is too long, or has fields that this server doesn't know."""
    refuse_unknown_fields("resume", message)
    check_size(len(message.outputs), 0)
    check_size(len(message.outputs), sum(len(each.ids) for each in message.outputs))
    return Resume(
        seed=message.seed,
        prompt_token_ids=message.prompt_token_ids.ids,
        fingerprint=message.model_fingerprint,
        outputs=tuple(tuple(each.ids) for each in message.outputs),
        num_prompt_logprobs=message.num_prompt_logprobs,
        proof=message.proof,
    )


def decode_chat(message: inference_pb2.Chat, *, max_bytes: int) -> Chat:
    """Raises InvalidRequestError: it is too long, or what should be JSON objects are none."""
    check_chat_size(len(message.messages), len(message.tools))
    if message.ByteSize() > max_bytes:
        raise InvalidRequestError(
            f"chat of {message.ByteSize()} bytes is longer than max_prompt_bytes={max_bytes}"
        )
    begins = not message.continue_final_message
    if message.HasField("add_generation_prompt"):
        begins = message.add_generation_prompt
    return Chat(
        messages=[_message_of(place, each) for place, each in enumerate(message.messages)],
        tools=[_object(f"tools[{place}]", each) for place, each in enumerate(message.tools)],
        arguments=_object("template_arguments", message.template_arguments),
        add_generation_prompt=begins,
        continue_final_message=message.continue_final_message,
    )


def _message_of(place: int, message: inference_pb2.ChatMessage) -> dict[str, Any]:
    fields = _object(f"messages[{place}].fields", message.fields)
    for name in ("role", "content"):
        if name in fields:
            raise InvalidRequestError(
                f"messages[{place}].fields has {name!r}: the message's own field {name} sets it"
            )
    content = message.content if message.HasField("content") else None
    return {"role": message.role, "content": content, **fields}


def _object(name: str, text: str) -> dict[str, Any]:
    """The JSON object in the field `name`; an empty one where it is unset."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} is a JSON {type(value).__name__}: must be an object")
    return value
