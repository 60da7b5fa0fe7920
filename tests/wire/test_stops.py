"""What ends a choice, as clients are told: stop strings, which the frontend finds, stop tokens."""

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest

from protos import common_pb2, inference_pb2
from runtime import llm as llm_module
from runtime.frontend.text import Tokenizer
from runtime.llm import LLM
from runtime.request import FinishReason, Request, RequestOutput, TokenLogprobs
from runtime.sampling_params import SamplingParams
from tests.frontend import (
    LINES,
    TIMEOUT_S,
    Client,
    FakeConnection,
    FakeEngine,
    make_byte_fallback_tokenizer,
)
from tests.tokenizing import byte_tokens

pytestmark = pytest.mark.wire

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH
EOS = 1
TOKENIZER = Tokenizer(make_byte_fallback_tokenizer(LINES))  # the model's


def chars(text: str) -> list[int]:
    """A token for each byte."""
    return byte_tokens(TOKENIZER, text.encode())


@dataclass
class Told:
    """What a client was told of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0
    stop: str | int | None = None


class Asked:
    """A request at the engine, and the call that waits for its answer."""

    def __init__(self, engine: FakeEngine, client: Client, **params: object) -> None:
        self.call = client.generate("two", **params)
        self.connection: FakeConnection
        self.request: Request
        self.connection, self.request = engine.added.get(timeout=TIMEOUT_S)

    def bring(
        self,
        text: str,
        *,
        index: int = 0,
        reason: FinishReason | None = None,
        tokens: tuple[int, ...] = (),
    ) -> None:
        """One step for a choice: the characters, then the tokens."""
        output = RequestOutput(self.request.request_id, (*chars(text), *tokens), reason, index, 16)
        self.connection.sink([output])

    def told(self) -> list[Told]:
        """Reads to the end; one for each choice."""
        told = [Told() for _ in range(self.request.params.n)]
        usage = None
        for response in self.call:
            choice = told[response.index]
            assert not choice.finish_reason, "something came after the end"
            choice.text += response.text
            choice.token_ids.extend(response.token_ids)
            choice.finish_reason = response.finish_reason
            if response.WhichOneof("stop"):
                choice.stop = getattr(response, response.WhichOneof("stop"))
            usage = response.usage if response.HasField("usage") else usage
        num_output_tokens = sum(len(choice.token_ids) for choice in told)
        assert usage == inference_pb2.Usage(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=num_output_tokens,
            num_cached_tokens=16,
        )
        return told


def aborts(engine: FakeEngine, client: Client) -> list[int | tuple[int, int]]:
    """What the engine was told to end so far."""
    client.call("GetStats")  # answered after everything that went before it on the stream
    told = []
    while not engine.aborted.empty():
        told.append(engine.aborted.get())
    return told


def test_a_stop_string_ends_its_choice_alone(engine: FakeEngine, client: Client) -> None:
    asked = Asked(engine, client, n=3, stop=["STOP"])
    key = asked.request.request_id
    for char in "abSTO":
        asked.bring(char, index=1)
    asked.bring("P", index=1)
    assert engine.aborted.get(timeout=TIMEOUT_S) == (key, 1)
    asked.bring("never seen", index=1)  # was under way
    asked.bring("cSTO", index=0)
    asked.bring("STOP", index=2)
    assert engine.aborted.get(timeout=TIMEOUT_S) == (key, 2)
    asked.bring("never seen", index=2, reason=LENGTH)  # its own end was under way
    asked.bring("d", index=0, reason=LENGTH)
    assert asked.told() == [
        Told("cSTOd", chars("cSTOd"), LENGTH),
        Told("ab", chars("abSTOP"), STOP, "STOP"),
        Told("", chars("STOP"), STOP, "STOP"),
    ]
    assert aborts(engine, client) == []


def test_the_last_choice_to_stop_ends_the_request(engine: FakeEngine, client: Client) -> None:
    asked = Asked(engine, client, n=2, stop=["."])
    asked.bring("a.", index=1)
    asked.bring("b.", index=0)
    assert [each.text for each in asked.told()] == ["b", "a"]
    key = asked.request.request_id
    assert aborts(engine, client) == [(key, 1), (key, 0)]
    asked.bring("c", index=0)  # was under way
    other = Asked(engine, client)
    other.bring("d", reason=LENGTH)
    assert [each.text for each in other.told()] == ["d"]


def test_what_may_become_a_stop_string_is_held_back(engine: FakeEngine, client: Client) -> None:
    asked = Asked(engine, client, stop=["STOP", "STEP"])
    pieces = []
    for char in "aSTaSTE":
        asked.bring(char)
        pieces.append(next(asked.call).text)
    assert pieces == ["a", "", "", "STa", "", "", ""]
    asked.bring("?", reason=LENGTH)
    assert next(asked.call).text == "STE?"


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_in_merged_steps(engine: FakeEngine, client: Client, keeps: bool) -> None:
    asked = Asked(engine, client, stop=["zz", "OP"], include_stop_str_in_output=keeps)
    asked.bring("abSTOPxyzz")
    text = "abSTOP" if keeps else "abST"
    assert asked.told() == [Told(text, chars("abSTOP"), STOP, "OP")]
    assert aborts(engine, client) == [(asked.request.request_id, 0)]


@pytest.mark.parametrize(
    ("text", "tokens", "reason"),
    [
        ("abSTOP", (), LENGTH),  # in the very token that also ends it by length
        ("abSTOPxyz", (), LENGTH),
        ("abSTOP", (EOS,), STOP),
        ("abSTOPx", (EOS,), STOP),
    ],
)
def test_a_stop_string_before_the_engines_own_end(
    engine: FakeEngine, client: Client, text: str, tokens: tuple[int, ...], reason: FinishReason
) -> None:
    asked = Asked(engine, client, n=2, stop=["STOP"])
    asked.bring(text, tokens=tokens, reason=reason)
    asked.bring("c", index=1)
    assert [next(asked.call).stop_string for _ in range(2)] == ["STOP", ""]
    assert aborts(engine, client) == [], "the engine knows already"
    asked.bring("d", index=1, reason=LENGTH)
    assert next(asked.call).usage.num_output_tokens == 6 + 2


@pytest.mark.parametrize(
    ("keeps", "skips", "text"),
    [
        (False, True, "abST"),
        (False, False, "abST"),
        (True, True, "abST"),
        (True, False, "abST</s>"),
    ],
)
def test_an_end_token_within_a_stop_string(
    engine: FakeEngine, client: Client, keeps: bool, skips: bool, text: str
) -> None:
    asked = Asked(
        engine,
        client,
        stop=["STOP"],
        include_stop_str_in_output=keeps,
        skip_special_tokens=skips,
    )
    asked.bring("abST")
    asked.bring("", tokens=(EOS,), reason=STOP)
    assert asked.told() == [Told(text, [*chars("abST"), EOS], STOP, EOS)]


@pytest.mark.parametrize("steps", [["abSTOP"], ["abS", "TOP"], ["a", "b", "STO", "P"]])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_text_of_a_stop_token_is_left_out_or_kept(
    engine: FakeEngine, client: Client, keeps: bool, steps: list[str]
) -> None:
    (token,) = chars("P")
    asked = Asked(engine, client, stop_token_ids=[token], include_stop_str_in_output=keeps)
    for step in steps:
        asked.bring(step, reason=STOP if step is steps[-1] else None)
    text = "abSTOP" if keeps else "abSTO"
    assert asked.told() == [Told(text, chars("abSTOP"), STOP, token)]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_that_a_stop_token_completes(
    engine: FakeEngine, client: Client, keeps: bool
) -> None:
    """Without that token's text there is none."""
    (token,) = chars("P")
    asked = Asked(
        engine, client, stop=["TOP"], stop_token_ids=[token], include_stop_str_in_output=keeps
    )
    asked.bring("abSTOP", reason=STOP)
    wanted = Told("abSTO", chars("abSTOP"), STOP, token)
    if keeps:
        wanted = Told("abSTOP", chars("abSTOP"), STOP, "TOP")
    assert asked.told() == [wanted]


@pytest.mark.parametrize("reason", [LENGTH, FinishReason.ABORT])
def test_other_ends_name_no_stop(engine: FakeEngine, client: Client, reason: FinishReason) -> None:
    asked = Asked(engine, client, stop=["STOP"], stop_token_ids=[5])
    asked.bring("abSTO", reason=reason)
    assert asked.told() == [Told("abSTO", chars("abSTO"), reason)]


@pytest.mark.parametrize("min_tokens", [3, 4, 5])
def test_no_stop_string_in_what_the_first_tokens_bring(
    engine: FakeEngine, client: Client, min_tokens: int
) -> None:
    asked = Asked(engine, client, stop=["a", "cd"], min_tokens=min_tokens)
    asked.bring("xabcdefaz", reason=LENGTH)
    (told,) = asked.told()
    text, stop = ("xab", "cd") if min_tokens < 5 else ("xabcdef", "a")
    assert told == Told(text, chars(text + stop), STOP, stop)


def test_a_stop_string_at_the_very_first_character(engine: FakeEngine, client: Client) -> None:
    asked = Asked(engine, client, stop=["a"])
    asked.bring("abc")
    assert asked.told() == [Told("", chars("a"), STOP, "a")]


def test_a_client_that_leaves_after_a_choice_has_stopped(
    engine: FakeEngine, client: Client
) -> None:
    asked = Asked(engine, client, n=2, stop=["."])
    asked.bring("a.", index=1)
    assert next(asked.call).finish_reason == common_pb2.FINISH_REASON_STOP
    key = asked.request.request_id
    assert engine.aborted.get(timeout=TIMEOUT_S) == (key, 1)
    asked.call.cancel()
    assert engine.aborted.get(timeout=TIMEOUT_S) == key
    asked.bring("b", index=0, reason=LENGTH)  # was under way
    assert aborts(engine, client) == []


def test_offline_the_engine_is_told_too(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer() -> None:
        connection, request = engine.added.get(timeout=TIMEOUT_S)
        for index, text in ((1, "ab.xy"), (0, "cd"), (1, "never seen")):
            entries = (TokenLogprobs(-0.5, (), ()),) * len(text)
            output = RequestOutput(
                request.request_id, tuple(chars(text)), None, index, logprobs=entries
            )
            connection.sink([output])
        assert engine.aborted.get(timeout=TIMEOUT_S) == (request.request_id, 1)
        connection.sink([RequestOutput(request.request_id, tuple(chars("e.f")), LENGTH, 0)])

    monkeypatch.setattr(llm_module, "running_engine", lambda *_, **__: nullcontext(engine))
    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    with LLM(progress=False) as llm:
        params = SamplingParams(n=2, stop=(".",), logprobs=0)
        first, second = llm.generate(["two"], params, progress=False)
    answering.join(TIMEOUT_S)
    assert [(each.text, each.stop) for each in (first, second)] == [("cde", "."), ("ab", ".")]
    assert [list(each.token_ids) for each in (first, second)] == [chars("cde."), chars("ab.")]
    assert len(second.logprobs) == 3
    assert engine.aborted.empty(), "choice 0 had ended in the engine too"
