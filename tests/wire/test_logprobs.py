"""Log probabilities as clients read them, over an engine whose steps the test writes."""

import pytest

from protos import inference_pb2
from runtime import engine_codec
from runtime.frontend.text import REPLACEMENT, Tokenizer
from runtime.request import FinishReason, RequestOutput, TokenLogprobs
from tests.frontend import (
    LINES,
    TIMEOUT_S,
    VOCAB_SIZE,
    Client,
    FakeEngine,
    make_byte_fallback_tokenizer,
)
from tests.tokenizing import byte_tokens

pytestmark = pytest.mark.wire

LENGTH = FinishReason.LENGTH
TOKENIZER = Tokenizer(make_byte_fallback_tokenizer(LINES))  # the model's
FOX = TOKENIZER.encode(" fox")
PROMPT = TOKENIZER.encode("The lazy dog, the quick fox")


def chars(text: str) -> list[int]:
    """A token for each byte."""
    return byte_tokens(TOKENIZER, text.encode())


def entries(tokens: list[int], count: int = 0) -> tuple[TokenLogprobs, ...]:
    """An entry for each token, told apart by its logprob; the tops are the tokens after it."""
    return tuple(
        TokenLogprobs(
            -token / 8,
            tuple(range(token + 1, token + 1 + count)),
            tuple(-place / 8 for place in range(count)),
        )
        for token in tokens
    )


def message_of(token: int, logprob: float | None) -> inference_pb2.TokenLogprob:
    data = TOKENIZER.token_bytes(token)
    return inference_pb2.TokenLogprob(
        token_id=token, text=data.decode(errors="replace"), token_bytes=data, logprob=logprob
    )


def messages_of(tokens: list[int], count: int = 0) -> list[inference_pb2.TokenLogprob]:
    """What `entries` read as."""
    messages = []
    for token, entry in zip(tokens, entries(tokens, count), strict=True):
        message = message_of(token, entry.logprob)
        for top, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            one = message_of(top, logprob)
            message.top.add(
                token_id=top, text=one.text, token_bytes=one.token_bytes, logprob=logprob
            )
        messages.append(message)
    return messages


class Asked:
    """A request at the engine, and the call that waits for its answer."""

    def __init__(
        self, engine: FakeEngine, client: Client, prompt: list[int] = PROMPT, **params: object
    ) -> None:
        self.call = client.generate(token_ids=prompt, **params)
        self._connection, self.request = engine.added.get(timeout=TIMEOUT_S)

    def bring(self, tokens: list[int] = (), reason: FinishReason | None = None, **fields) -> None:
        output = RequestOutput(self.request.request_id, tuple(tokens), reason, **fields)
        self._connection.sink([output])


@pytest.mark.parametrize("count", [0, 1, 20])
def test_there_is_one_for_each_token(engine: FakeEngine, client: Client, count: int) -> None:
    asked = Asked(engine, client, logprobs=count)
    tokens = [*FOX, *chars("ก")]  # the last are parts of a character
    for token in tokens:
        asked.bring([token], logprobs=entries([token], count))
        response = next(asked.call)
        assert list(response.logprobs) == messages_of([token], count)
    asked.bring(FOX, LENGTH, logprobs=entries(FOX, count))
    (response,) = asked.call
    assert list(response.logprobs) == messages_of(FOX, count)


def test_a_token_has_its_own_text_and_bytes(engine: FakeEngine, client: Client) -> None:
    asked = Asked(engine, client, logprobs=1)
    thai = chars("ก")
    unknown = VOCAB_SIZE - 1  # to the tokenizer
    asked.bring(
        [FOX[0], thai[0], unknown, 1],
        LENGTH,
        logprobs=tuple(TokenLogprobs(-0.5, (thai[1],), (-0.25,)) for _ in range(4)),
    )
    (response,) = asked.call
    assert [(each.text, each.token_bytes) for each in response.logprobs] == [
        (TOKENIZER.decode(FOX[:1]), TOKENIZER.decode(FOX[:1]).encode()),
        (REPLACEMENT, b"\xe0"),
        ("", b""),
        ("</s>", b"</s>"),
    ]
    assert {(each.top[0].text, each.top[0].token_bytes) for each in response.logprobs} == {
        (REPLACEMENT, b"\xb8")
    }
    assert response.text.startswith(TOKENIZER.decode(FOX[:1]))


def test_none_where_they_are_not_asked_for(engine: FakeEngine, client: Client) -> None:
    asked = Asked(engine, client)
    asked.bring(FOX, LENGTH)
    (response,) = asked.call
    assert not response.logprobs
    assert not response.prompt_logprobs


@pytest.mark.parametrize("merged", [False, True])
def test_they_are_cut_with_the_tokens(engine: FakeEngine, client: Client, merged: bool) -> None:
    asked = Asked(engine, client, logprobs=2, stop=["lo"])
    tokens = chars("hello you")
    for part in [tokens] if merged else [tokens[:2], tokens[2:4], tokens[4:]]:
        asked.bring(part, logprobs=entries(part, 2))
    responses = list(asked.call)
    assert [each for response in responses for each in response.logprobs] == messages_of(
        tokens[:5], 2
    )
    assert [token for response in responses for token in response.token_ids] == tokens[:5]


def test_each_choice_has_its_own(engine: FakeEngine, client: Client) -> None:
    asked = Asked(engine, client, n=2, logprobs=1)
    asked.bring(FOX[:1], choice=1, logprobs=entries(FOX[:1], 1))
    asked.bring(PROMPT[:1], choice=0, logprobs=entries(PROMPT[:1], 1))
    asked.bring(PROMPT[1:], LENGTH, choice=1, logprobs=entries(PROMPT[1:], 1))
    asked.bring(FOX[1:], LENGTH, choice=0, logprobs=entries(FOX[1:], 1))
    told: dict[int, list[inference_pb2.TokenLogprob]] = {0: [], 1: []}
    for response in asked.call:
        told[response.index].extend(response.logprobs)
    assert told == {
        0: messages_of([PROMPT[0], *FOX[1:]], 1),
        1: messages_of([FOX[0], *PROMPT[1:]], 1),
    }


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("chunks", [[0], [2], [1, 3], [2, 2, 4]])
def test_those_of_the_prompt_come_chunk_by_chunk_before_the_first_token(
    engine: FakeEngine, client: Client, chunks: list[int], count: int
) -> None:
    asked = Asked(engine, client, n=2, prompt_logprobs=count)
    assert len(PROMPT) > 5
    told = []
    for start, end in zip([0, *chunks], chunks, strict=False):
        asked.bring(scores=entries(PROMPT[start + 1 : end + 1], count))
        response = next(asked.call)
        assert (response.index, response.text, list(response.token_ids)) == (0, "", [])
        told.extend(response.prompt_logprobs)
    asked.bring(FOX[:1], scores=entries(PROMPT[chunks[-1] + 1 :], count))
    told.extend(next(asked.call).prompt_logprobs)
    asked.bring(FOX[1:], LENGTH)
    asked.bring(FOX, LENGTH, choice=1)
    assert not any(response.prompt_logprobs for response in asked.call)
    assert told == [message_of(PROMPT[0], None), *messages_of(PROMPT[1:], count)]
    assert [each.HasField("logprob") for each in told] == [False] + [True] * (len(PROMPT) - 1)


def test_a_prompt_of_one_token_has_one_entry_without_logprob(
    engine: FakeEngine, client: Client
) -> None:
    asked = Asked(engine, client, prompt=[5], prompt_logprobs=2)
    asked.bring(FOX[:1])
    asked.bring(FOX[1:], LENGTH)
    responses = list(asked.call)
    told = [each for response in responses for each in response.prompt_logprobs]
    assert told == [message_of(5, None)]
    assert responses[0].prompt_logprobs


def test_both_kinds_in_merged_steps(engine: FakeEngine, client: Client) -> None:
    asked = Asked(engine, client, n=2, logprobs=1, prompt_logprobs=0)
    key = asked.request.request_id
    # One message: what one choice got in one step, and what the others got in it.
    asked._connection.sink(
        [
            RequestOutput(
                key,
                tuple(FOX),
                LENGTH,
                0,
                logprobs=entries(FOX, 1),
                scores=entries(PROMPT[1:]),
            ),
            RequestOutput(key, tuple(FOX[:1]), LENGTH, 1, logprobs=entries(FOX[:1], 1)),
        ]
    )
    first, second = asked.call
    assert list(first.logprobs) == messages_of(FOX, 1)
    assert list(first.prompt_logprobs) == [message_of(PROMPT[0], None), *messages_of(PROMPT[1:])]
    assert list(second.logprobs) == messages_of(FOX[:1], 1)
    assert not second.prompt_logprobs


def test_a_probability_of_zero_has_its_own_number() -> None:
    """No infinity on the wire, in either direction."""
    outputs = [RequestOutput(1, (5,), logprobs=(TokenLogprobs(-9999.0, (6,), (-0.0,)),))]
    assert engine_codec.decode_outputs(engine_codec.encode_outputs(outputs)) == outputs
