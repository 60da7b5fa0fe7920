"""The text of an output: where it ends, and which tokens belong to it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend.output_text import OutputText, TextDelta
from runtime.frontend.text import REPLACEMENT, Detokenizer, Tokenizer
from runtime.sampling_params import SamplingParams
from tests.tokenizing import BOS, EOS, LINES, TOKENIZERS, byte_tokens

pytestmark = pytest.mark.unit

CHARS = TOKENIZERS["bytes"]  # a token for each byte


def run(
    pushes: list[list[int]],
    *,
    tokenizer: Tokenizer = CHARS,
    ends_with_stop_token: bool = False,
    **params: object,
) -> tuple[str, int, str | None]:
    """The whole text, the tokens that belong to it, what stopped it; the last push is the end."""
    output = OutputText(tokenizer, [BOS], SamplingParams(max_tokens=100, **params))
    deltas = [output.push(token_ids) for token_ids in pushes[:-1]]
    deltas.append(output.finish(pushes[-1], ends_with_stop_token=ends_with_stop_token))
    stops = [delta.stop for delta in deltas if delta.stop is not None]
    assert len(stops) <= 1
    text = "".join(delta.text for delta in deltas)
    return text, sum(delta.num_tokens for delta in deltas), *(stops or [None])


def expected(
    tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams
) -> tuple[str, int, str | None]:
    """The same by looking at the whole text at every character, token by token."""
    detokenizer = Detokenizer(tokenizer, [BOS])
    pieces = [detokenizer.push([token_id]) for token_id in token_ids]
    pieces.append(detokenizer.finish())
    text = ""
    for number, piece in enumerate(pieces, start=1):
        number = min(number, len(token_ids))
        for char in piece:
            text += char
            found = [stop for stop in params.stop if text.endswith(stop)]
            if found and number > params.min_tokens:
                stop = max(found, key=len)
                kept = params.include_stop_str_in_output
                return text if kept else text.removesuffix(stop), number, stop
    return text, len(token_ids), None


@settings(deadline=None)
@given(data=st.data(), text=st.sampled_from(LINES) | st.text("ab é👍🏽\u0301", max_size=12))
def test_every_cut_ends_where_the_whole_text_says(data: st.DataObject, text: str) -> None:
    tokenizer = TOKENIZERS[data.draw(st.sampled_from(sorted(TOKENIZERS)))]
    token_ids = data.draw(
        st.sampled_from([tokenizer.encode(text), byte_tokens(tokenizer, text.encode()[:-1])])
    )
    starts = st.integers(0, max(len(text) - 1, 0))
    from_text = st.builds(lambda start, size: text[start : start + size] or "x", starts, starts)
    stops = data.draw(st.lists(from_text | st.text(min_size=1, max_size=2), max_size=4))
    params = SamplingParams(
        max_tokens=1000,
        stop=tuple(stops),
        min_tokens=data.draw(st.integers(0, len(token_ids) + 1)),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5))
    output = OutputText(tokenizer, [BOS], params)
    deltas = [
        output.push(token_ids[a:b])
        for a, b in itertools.pairwise([0, *sorted(cuts), len(token_ids)])
    ]
    deltas.append(output.finish())
    stop = next((delta.stop for delta in deltas if delta.stop is not None), None)
    whole = "".join(delta.text for delta in deltas)
    num_tokens = sum(delta.num_tokens for delta in deltas)
    assert (whole, num_tokens, stop) == expected(tokenizer, token_ids, params)
    at_once = OutputText(tokenizer, [BOS], params).finish(token_ids)
    assert at_once == TextDelta(whole, num_tokens, stop)


def letters(text: str) -> list[int]:
    return byte_tokens(CHARS, text.encode())


def test_tokens_after_a_stop_string_are_no_part_of_the_output() -> None:
    assert run([letters("one STOP two"), letters("three")], stop=("STOP",)) == ("one ", 8, "STOP")


def test_a_stop_string_at_the_very_start() -> None:
    assert run([letters("ST"), letters("OP")], stop=("STOP",)) == ("", 4, "STOP")
    kept = {"include_stop_str_in_output": True}
    assert run([letters("ST"), letters("OP")], stop=("STOP",), **kept) == ("STOP", 4, "STOP")


def test_what_could_be_a_stop_string_comes_when_it_is_none() -> None:
    output = OutputText(CHARS, [BOS], SamplingParams(max_tokens=100, stop=("STOP", "TOY")))
    texts = [output.push([token_id]).text for token_id in letters("aSTOxST")]
    assert texts == ["a", "", "", "", "STOx", "", ""]
    assert output.finish() == TextDelta("ST", 0)


def test_nothing_comes_after_the_end() -> None:
    output = OutputText(CHARS, [BOS], SamplingParams(max_tokens=100, stop=("b",)))
    assert output.push(letters("abc")) == TextDelta("a", 2, "b")
    assert output.push(letters("dbe")) == TextDelta("", 0)
    assert output.finish(letters("f")) == TextDelta("", 0)


@pytest.mark.parametrize("min_tokens", range(8))
def test_a_stop_string_counts_after_min_tokens(min_tokens: int) -> None:
    result = run([letters("abab"), letters("ab")], stop=("ab",), min_tokens=min_tokens)
    match min_tokens:
        case 0 | 1:
            assert result == ("", 2, "ab")
        case 2 | 3:
            assert result == ("ab", 4, "ab")
        case 4 | 5:  # also where it began before
            assert result == ("abab", 6, "ab")
        case _:
            assert result == ("ababab", 6, None)


@pytest.mark.parametrize("cut", range(5))
def test_the_text_of_a_stop_token_is_left_out_or_kept(cut: int) -> None:
    token_ids = letters("four.")
    pushes = [token_ids[:cut], token_ids[cut:]]
    stopped = {"ends_with_stop_token": True}
    assert run(pushes) == ("four.", 5, None)
    assert run(pushes, **stopped) == ("four", 5, None)
    assert run(pushes, **stopped, stop=("r.",)) == ("four", 5, None)
    assert run(pushes, **stopped, stop=("r",)) == ("fou", 4, "r")
    kept = {"include_stop_str_in_output": True}
    assert run(pushes, **stopped, **kept) == ("four.", 5, None)
    assert run(pushes, **stopped, **kept, stop=("r.",)) == ("four.", 5, "r.")


def test_a_special_stop_token_has_text_only_where_both_are_asked_for() -> None:
    pushes = [[*letters("a"), EOS, *letters("b"), EOS]]
    stopped = {"ends_with_stop_token": True}
    assert run(pushes, **stopped)[0] == "ab"
    assert run(pushes, **stopped, skip_special_tokens=False)[0] == "a</s>b"
    assert run(pushes, **stopped, include_stop_str_in_output=True)[0] == "ab"
    both = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert run(pushes, **stopped, **both)[0] == "a</s>b</s>"


def test_a_special_token_can_be_a_stop_string() -> None:
    pushes = [letters("ab"), [EOS], letters("c")]
    assert run(pushes, stop=("</s>",), skip_special_tokens=False) == ("ab", 3, "</s>")
    assert run(pushes, stop=("</s>",)) == ("abc", 4, None)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_that_stays_incomplete_is_looked_at_in_the_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = byte_tokens(tokenizer, "xก".encode()[:-1])
    assert (
        not OutputText(tokenizer, [BOS], SamplingParams(max_tokens=9, stop=(REPLACEMENT,)))
        .push(token_ids)
        .stop
    )
    text, num_tokens, stop = run([token_ids], tokenizer=tokenizer, stop=(REPLACEMENT,))
    assert (text, stop) == ("x", REPLACEMENT)
    assert num_tokens == len(token_ids)
    stopped = run(
        [[*token_ids, EOS]], tokenizer=tokenizer, stop=(REPLACEMENT,), ends_with_stop_token=True
    )
    assert stopped == ("x", len(token_ids), REPLACEMENT)


def test_a_stop_string_inside_a_character_of_several_tokens() -> None:
    token_ids = byte_tokens(CHARS, "a👍b".encode())
    assert len(token_ids) == 6
    for cut in range(6):
        pushes = [token_ids[:cut], token_ids[cut:]]
        assert run(pushes, stop=("👍",)) == ("a", 5, "👍")
        assert run(pushes, stop=("👍",), min_tokens=4) == ("a", 5, "👍")
        assert run(pushes, stop=("👍",), min_tokens=5) == ("a👍b", 6, None)
