"""LangChain's adapter: langchain_chat.py URL KEY. Prints what it got, as one line of JSON."""

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


@tool
def look(city: Literal["Paris", "London"], far: bool) -> str:
    """Looks at a city."""
    return city


class Place(BaseModel):
    """Where it is."""

    city: Literal["Paris", "London"]
    far: bool


def main(url: str, key: str) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "base_url": f"{url}/v1",
        "api_key": key,
        "temperature": 0,
        "max_retries": 0,
        "timeout": 120,
    }
    messages = [SystemMessage("Be short."), HumanMessage("Where is the Eiffel tower?")]
    chat = ChatOpenAI(**options, max_tokens=8)
    caller = ChatOpenAI(**options, max_tokens=60)
    whole = chat.invoke(messages)
    # Strict: other schemas allow fields that they don't name, and a small model has many ideas.
    named = caller.bind_tools([look], tool_choice="look", strict=True)
    forced = caller.bind_tools([look], tool_choice="any", strict=True)
    by_schema = caller.with_structured_output(Place)
    by_call = caller.with_structured_output(Place, method="function_calling", strict=True)
    found = {
        "text": OpenAI(**options, max_tokens=5).invoke("The capital of France is"),
        "chat": whole.content,
        "completion_tokens": whole.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in chat.stream(messages)),
        "batch": [each.content for each in chat.batch([messages] * 4)],
        "named": first_call(named.invoke(messages)),
        "forced": first_call(whole_of(forced.stream(messages))),
        "by_schema": by_schema.invoke(messages).model_dump(),
        "by_call": by_call.invoke(messages).model_dump(),
    }
    print(json.dumps(found))


def whole_of(chunks: Any) -> Any:
    whole = next(chunks)
    for chunk in chunks:
        whole += chunk
    return whole


def first_call(message: Any) -> dict[str, Any]:
    call = message.tool_calls[0]
    return {"name": call["name"], "arguments": call["args"]}


if __name__ == "__main__":
    main(*sys.argv[1:])
