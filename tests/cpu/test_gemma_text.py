"""The embedded model's own tokenizer: what it streams, its tokens' bytes, where it stops."""

import pytest

from runtime.frontend.output_text import OutputText
from runtime.frontend.text import REPLACEMENT, Tokenizer
from runtime.sampling_params import SamplingParams
from tests.builders import demo_model_folder
from tests.tokenizing import HARD_TEXTS, LINES, byte_tokens, continuation, stream

pytestmark = pytest.mark.cpu

PROMPTS = ["", "Say:", "ends with space ", "ภ", "👩‍👩‍👧"]
END_OF_TURN = 106


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(demo_model_folder())
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_is_the_whole_decoded(tokenizer: Tokenizer, prompt: str, skip: bool) -> None:
    prompt_ids = tokenizer.encode(prompt)
    for text in HARD_TEXTS:
        words = tokenizer.encode(text, add_special_tokens=False)
        in_bytes = byte_tokens(tokenizer, text.encode())
        for output in (words, in_bytes, [*words, END_OF_TURN, *in_bytes, END_OF_TURN]):
            texts = stream(tokenizer, prompt_ids, [[i] for i in output], skip_special_tokens=skip)
            whole = continuation(tokenizer, prompt_ids, output, skip_special_tokens=skip)
            assert "".join(texts) == whole
            assert "".join(texts).count("<end_of_turn>") == (
                0 if skip else output.count(END_OF_TURN)
            )
            assert REPLACEMENT in text or not any(REPLACEMENT in each for each in texts)


@pytest.mark.parametrize("char", ["ก", "👍", "é", "م"])
def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer, char: str) -> None:
    data = char.encode()
    for size in range(1, len(data)):
        prompt = [*tokenizer.encode("Say:"), *byte_tokens(tokenizer, data[:size])]
        output = [[i] for i in byte_tokens(tokenizer, data[size:] + b"x")]
        texts = stream(tokenizer, prompt, output)
        assert "".join(texts) == f"{char}x"
        assert texts[: len(data) - size - 1] == [""] * (len(data) - size - 1)


def test_the_bytes_of_a_text_are_those_of_its_tokens(tokenizer: Tokenizer) -> None:
    texts = [*HARD_TEXTS, " " * 33, "\n" * 40 + "\t\t", "<table>", "<0x41>", "<end_of_turn>[x]"]
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
        one_by_one = byte_tokens(tokenizer, text.encode())
        assert b"".join(map(tokenizer.token_bytes, one_by_one)) == text.encode()


def test_stop_strings_across_tokens(tokenizer: Tokenizer) -> None:
    for text in LINES:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(len(text) - 3):
            stop = text[start : start + 3]
            end = text.index(stop)
            for size in (1, 3, len(token_ids)):
                output = OutputText(tokenizer, [2], SamplingParams(max_tokens=99, stop=(stop,)))
                deltas = [
                    output.push(token_ids[place : place + size])
                    for place in range(0, len(token_ids), size)
                ]
                assert "".join(delta.text for delta in deltas) == text[:end]
                num_tokens = sum(delta.num_tokens for delta in deltas)
                assert stop in tokenizer.decode(token_ids[:num_tokens])
                assert stop not in tokenizer.decode(token_ids[: num_tokens - 1])
