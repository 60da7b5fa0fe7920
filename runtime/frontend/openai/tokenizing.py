"""/tokenize and /detokenize: between texts or chats and token ids."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from runtime.errors import InvalidRequestError
from runtime.frontend.openai import answers
from runtime.frontend.openai.body import Body, Object, Objects, describe, read_body
from runtime.frontend.openai.errors import check_model
from runtime.frontend.openai.logprobs import TokenNames
from runtime.frontend.openai.long_bodies import LongBodies
from runtime.frontend.prompts import Chat, PromptReader
from runtime.request import ModelInfo


class TokenizeBody(Body):
    """A text or a chat."""

    model: str | None = Field(default=None, description="The name of the model that is served.")
    prompt: str | None = None
    messages: Objects | None = Field(default=None, description="A chat, instead of a prompt.")
    tools: Objects | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="Those that begin every text: by default, but not in a chat."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    return_token_strs: bool | None = Field(default=None, description="Tell each token's text too.")


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = Field(default=None, description="The name of the model that is served.")
    # Not looked at one by one before it is known that they aren't too many.
    tokens: Annotated[list[Any], Field(json_schema_extra={"items": {"type": "integer"}})]


async def tokenize(
    content: bytes, reader: PromptReader, model: ModelInfo, bodies: LongBodies
) -> answers.Tokens:
    """Raises InvalidRequestError: a field is wrong."""
    body = await bodies.read(content, partial(read_body, TokenizeBody))
    if body.model is not None:
        check_model(body.model, model.name)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt or messages must be set, and not both")
    tokens = await _encode(body, reader)
    answer: answers.Tokens = {
        "count": len(tokens),
        "max_model_len": model.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        names = TokenNames(reader.tokenizer)
        answer["token_strs"] = await asyncio.to_thread(lambda: [*map(names.name, tokens)])
    return answer


async def detokenize(
    content: bytes, reader: PromptReader, model: ModelInfo, bodies: LongBodies
) -> answers.DetokenizedText:
    """Raises InvalidRequestError: a field is wrong."""

    def read(content: bytes) -> DetokenizeBody:
        body = read_body(DetokenizeBody, content)
        if body.model is not None:
            check_model(body.model, model.name)
        _check_tokens(body.tokens, model)
        return body

    body = await bodies.read(content, read)
    decode = reader.require_tokenizer().decode
    return {"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)}


async def _encode(body: TokenizeBody, reader: PromptReader) -> list[int]:
    if body.prompt is not None:
        return await reader.encode(
            "prompt", body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens=true is set with messages: the chat template writes those tokens"
        )
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    chat = Chat(
        messages=body.messages or [],
        tools=body.tools or [],
        arguments=body.chat_template_kwargs or {},
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
    )
    return (await reader.read_chat(chat)).token_ids


def _check_tokens(tokens: Sequence[object], model: ModelInfo) -> None:
    if len(tokens) > model.max_model_len:
        raise InvalidRequestError(
            f"tokens has {len(tokens)} entries: more than max_model_len={model.max_model_len}"
        )
    for place, each in enumerate(tokens):
        if type(each) is not int or not 0 <= each < model.vocab_size:
            raise InvalidRequestError(
                f"tokens[{place}]={describe(each)} must be in [0, {model.vocab_size}), the "
                "vocabulary"
            )
