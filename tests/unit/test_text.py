"""Text and token ids: what is streamed is what decoding at once gives."""

import itertools
import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from runtime.errors import ConfigError, InvalidRequestError
from runtime.frontend.text import REPLACEMENT, Detokenizer, Tokenizer
from tests.frontend import make_byte_fallback_tokenizer
from tests.tokenizing import (
    BOS,
    EOS,
    HARD_TEXTS,
    LINES,
    TOKENIZERS,
    byte_tokens,
    continuation,
    stream,
)

pytestmark = pytest.mark.unit


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("prompt", ["Say:", "ends with space ", "ภ", "x"])
def test_a_stream_is_the_whole_decoded(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    prompt_ids = tokenizer.encode(prompt)
    output = tokenizer.encode(text)
    texts = stream(tokenizer, prompt_ids, [[token_id] for token_id in output])
    assert "".join(texts) == continuation(tokenizer, prompt_ids, output)


def test_a_stream_is_the_whole_decoded_byte_by_byte(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Say:")
    for text in LINES:
        output = byte_tokens(tokenizer, text.encode())
        texts = stream(tokenizer, prompt, [[token_id] for token_id in output])
        assert "".join(texts) == text
        assert texts[-1] == ""
        assert not any(REPLACEMENT in delta for delta in texts)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), text=st.text(min_size=1, max_size=20), prompt=st.text(max_size=4))
@example(data=None, text="👩‍👩‍👧‍👦", prompt="")
def test_every_cut_gives_the_same_text(data: st.DataObject | None, text: str, prompt: str) -> None:
    for tokenizer in TOKENIZERS.values():
        prompt_ids = [BOS, *tokenizer.encode(prompt)]
        output = tokenizer.encode(text)
        cuts = [1] if data is None else data.draw(st.lists(st.integers(0, len(output))))
        borders = [0, *sorted(cuts), len(output)]
        pushes = [output[a:b] for a, b in itertools.pairwise(borders)]
        one_by_one = stream(tokenizer, prompt_ids, [[token_id] for token_id in output])
        assert "".join(stream(tokenizer, prompt_ids, pushes)) == "".join(one_by_one)
        assert "".join(one_by_one) == continuation(tokenizer, prompt_ids, output)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=40), prompt=st.sampled_from(["", "x", "ก"]))
@example(data=b"\x80" * 15 + "👍".encode(), prompt="")
def test_any_bytes_are_streamed_as_they_decode(data: bytes, prompt: str) -> None:
    for name in ("bytes", "byte-level"):
        tokenizer = TOKENIZERS[name]
        prompt_ids = tokenizer.encode(prompt)
        output = byte_tokens(tokenizer, data)
        texts = stream(tokenizer, prompt_ids, [[token_id] for token_id in output])
        assert "".join(texts) == data.decode(errors="replace")


def test_straddling_tokens_give_each_character_when_it_is_complete() -> None:
    tokenizer = TOKENIZERS["straddling"]
    output = tokenizer.encode("ก" * 12)
    texts = stream(tokenizer, [BOS], [[token_id] for token_id in output])
    assert len(output) == 14
    assert texts == ["", "", *["ก"] * 12, ""]


def test_the_first_token_keeps_its_space_after_a_prompt_only(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("quick brown")
    whole = tokenizer.encode("quick brown fox")
    assert whole[: len(prompt)] == prompt
    assert "".join(stream(tokenizer, prompt, [whole[len(prompt) :]])) == " fox"
    assert "".join(stream(tokenizer, [BOS], [tokenizer.encode("fox")])) == "fox"


def test_special_and_unknown_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("The")
    word = tokenizer.encode("The quick")[len(prompt) :]
    special, unknown = 1, 100_000
    pushes = [[special] * 20, word, [unknown, special]]
    texts = stream(tokenizer, [BOS, *prompt, special, *[BOS] * 30], pushes)
    assert texts == ["", " quick", "", ""]


@pytest.mark.parametrize("name", ["bytes", "byte-level", "sentencepiece", "metaspace"])
def test_a_prompt_that_ends_inside_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    start, end = byte_tokens(tokenizer, b"\n\xe0\xb8"), byte_tokens(tokenizer, b"\x81")
    letter = byte_tokens(tokenizer, b"x") if "byte" in name else tokenizer.encode("x")[-1:]
    prompt = [*tokenizer.encode("The"), *start]
    assert stream(tokenizer, prompt, [end, letter]) == ["ก", "x", ""]
    assert stream(tokenizer, prompt, [letter]) == ["x", ""]
    assert stream(tokenizer, prompt, []) == [""]


def test_a_prompt_of_byte_tokens_longer_than_the_context(tokenizer: Tokenizer) -> None:
    for skipped in range(4):
        prompt = byte_tokens(tokenizer, ("x" * skipped + "ภาษาไทย").encode())
        output = byte_tokens(tokenizer, "กข".encode())
        assert "".join(stream(tokenizer, prompt, [[i] for i in output])) == "กข"


def test_a_broken_run_of_byte_tokens_keeps_what_was_given_out() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    prompt = tokenizer.encode("The")
    run, letter = byte_tokens(tokenizer, b"a\xe0"), tokenizer.encode("x")[-1:]
    assert tokenizer.decode([*prompt, *run, *letter]) == f"The{REPLACEMENT * 2}x"
    texts = stream(tokenizer, prompt, [[run[0]], [run[1]], letter, tokenizer.encode("b")[-1:]])
    assert texts == ["a", "", f"{REPLACEMENT}x", "b", ""]


def test_an_endless_run_of_wrong_bytes_is_not_held_back_for_ever(tokenizer: Tokenizer) -> None:
    wrong = byte_tokens(tokenizer, b"\x80")
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"))
    texts = [detokenizer.push(wrong) for _ in range(100)]
    assert len("".join(texts)) > 80
    assert len(detokenizer._window) <= 32
    assert "".join([*texts, detokenizer.finish()]) == REPLACEMENT * 100


def test_an_incomplete_character_at_the_end_is_a_replacement(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("x")
    texts = stream(tokenizer, prompt, [byte_tokens(tokenizer, "é".encode()[:1])])
    assert texts == ["", REPLACEMENT]


def test_combining_marks_are_not_normalized() -> None:
    text = "e\u0301"
    assert unicodedata.normalize("NFC", text) != text
    tokenizer = TOKENIZERS["bytes"]
    output = tokenizer.encode(text)
    assert stream(tokenizer, [BOS], [[i] for i in output]) == ["e", "", "\u0301", ""]


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    inner = TOKENIZERS["bytes"]._tokenizer
    content = json.loads(inner.to_str())
    content["truncation"] = {
        "max_length": 4,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer is not None
    assert len(tokenizer.encode("more than four")) == len("more than four")


def test_special_tokens_are_added_as_the_tokenizer_says() -> None:
    inner = make_byte_fallback_tokenizer(LINES[:1])
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("The")[0] == BOS
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.decode(tokenizer.encode("The")) == "The"


def test_special_tokens_are_not_added_to_a_rendered_chat() -> None:
    inner = make_byte_fallback_tokenizer(LINES[:1])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer = Tokenizer(inner)
    word = tokenizer.encode("The")[1:]
    assert tokenizer.encode("The", add_special_tokens=False) == word
    assert tokenizer.encode("<s>The</s>", add_special_tokens=False) == [BOS, *word, EOS]
    assert tokenizer.encode("", add_special_tokens=False) == []


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_special_tokens_can_be_kept_in_a_stream(tokenizer: Tokenizer, text: str) -> None:
    prompt = [BOS, *tokenizer.encode("Say:"), EOS]
    output = [*tokenizer.encode(text), EOS, EOS, BOS, *tokenizer.encode(text), EOS]
    texts = stream(tokenizer, prompt, [[i] for i in output], skip_special_tokens=False)
    assert "".join(texts) == continuation(tokenizer, prompt, output, skip_special_tokens=False)
    assert "".join(texts).count("</s>") == 3
    assert texts[-2] == "</s>"
    assert "".join(stream(tokenizer, prompt, [output])).count("</s>") == 0


def test_a_special_token_ends_an_incomplete_character(tokenizer: Tokenizer) -> None:
    output = [*byte_tokens(tokenizer, "ก".encode()[:2]), EOS]
    texts = stream(tokenizer, [BOS], [[i] for i in output], skip_special_tokens=False)
    assert texts[-2].endswith("</s>")
    assert "".join(texts).removesuffix("</s>") in (REPLACEMENT, 2 * REPLACEMENT)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(str(tmp_path)) is None


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.load(str(tmp_path))


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"character 2 is a lone surrogate, U\+D800"):
        TOKENIZERS["bytes"].encode("ab\ud800")
