"""What there is of resumed choices is read in turns, while the loop goes on."""

import asyncio

import pytest

from protos import inference_pb2
from runtime.errors import InvalidRequestError
from runtime.frontend import resume
from runtime.frontend.answer import decode_resume
from runtime.frontend.choice import Choice
from runtime.frontend.resume import MAX_RESUMED_TOKENS, NUM_AT_ONCE, Resume, past_of
from runtime.frontend.text import Tokenizer
from runtime.request import FinishReason, RequestOutput, ResumedChoice
from runtime.sampling_params import MAX_CHOICES, CompleteParams
from tests.frontend import LINES, make_byte_fallback_tokenizer, make_model
from tests.params import complete_params

pytestmark = pytest.mark.unit

PROMPT = [5]
MODEL = make_model(max_model_len=10**6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    make_byte_fallback_tokenizer(LINES).save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer is not None
    return tokenizer


def make_resume(*outputs: tuple[int, ...]) -> Resume:
    return Resume(seed=1, prompt_token_ids=PROMPT, fingerprint="", outputs=outputs)


def read(
    tokenizer: Tokenizer | None, params: CompleteParams, *outputs: tuple[int, ...]
) -> tuple[list[Choice], tuple[ResumedChoice, ...]]:
    choices = [Choice(tokenizer, PROMPT, params) for _ in range(params.n)]

    async def main() -> tuple[ResumedChoice, ...]:
        return await past_of(make_resume(*outputs), choices, params, MODEL, asyncio.Lock())

    return choices, asyncio.run(main())


def test_the_loop_goes_on_and_others_have_their_turns() -> None:
    params = complete_params(max_tokens=10**5, ignore_eos=True)
    output = (5,) * (20 * NUM_AT_ONCE)
    ended: list[str] = []

    async def main() -> int:
        turns = asyncio.Lock()
        num_turns = 0

        async def resumed(name: str, output: tuple[int, ...]) -> None:
            choices = [Choice(None, PROMPT, params)]
            await past_of(make_resume(output), choices, params, MODEL, turns)
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            long = group.create_task(resumed("long", output))
            group.create_task(resumed("short", (5,)))
            while not long.done():
                await asyncio.sleep(0)
                num_turns += 1
        return num_turns

    assert asyncio.run(main()) >= 20
    assert ended == ["short", "long"]


def test_in_parts_the_text_goes_on_as_at_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = complete_params(max_tokens=200, ignore_eos=True, stop=("zy\u00e4d",))
    text = "The quick \u00e4\u4e00 fox jumps over the lazy\u00e4dog."
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    whole = Choice(tokenizer, PROMPT, params).extend(RequestOutput(0, ids, FinishReason.LENGTH))
    assert whole.stop is not None
    assert len(whole.token_ids) < len(ids)
    for at_once in (1, 3, 256):
        monkeypatch.setattr(resume, "NUM_AT_ONCE", at_once)
        for length in range(len(whole.token_ids) + 1):
            (choice,), (past,) = read(tokenizer, params, ids[:length])
            assert past == ResumedChoice(ids[:length], length == len(whole.token_ids))
            if not past.has_ended:
                before = Choice(tokenizer, PROMPT, params)
                before.extend(RequestOutput(0, ids[:length]))
                rest = RequestOutput(0, ids[length:], FinishReason.LENGTH)
                assert choice.extend(rest) == before.extend(rest)
        with pytest.raises(InvalidRequestError, match="goes on after its end, which is token"):
            read(tokenizer, params, ids)


@pytest.mark.parametrize("at_once", [1, 2, 256])
def test_what_goes_on_after_an_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(resume, "NUM_AT_ONCE", at_once)
    params = complete_params(max_tokens=5, stop_token_ids=(7,))
    with pytest.raises(InvalidRequestError, match="goes on after its end, which is token 2"):
        read(None, params, (5, 7, 5))
    with pytest.raises(InvalidRequestError, match=r"has token id 600: must be in \[0, 600\)"):
        read(None, params, (5, 5, 600))
    assert read(None, params, (5, 5, 7))[1] == (ResumedChoice((5, 5, 7), True),)
    assert read(None, params, (5,) * 5)[1] == (ResumedChoice((5,) * 5, True),)
    assert read(None, params, (5,) * 4)[1] == (ResumedChoice((5,) * 4),)


def test_too_much_is_refused_before_it_is_copied() -> None:
    message = inference_pb2.Resume(seed=1)
    for _ in range(2):
        message.outputs.add(ids=[5] * (MAX_RESUMED_TOKENS // 2))
    assert len(decode_resume(message).outputs) == 2
    message.outputs.add(ids=[5])
    with pytest.raises(InvalidRequestError, match="262145 tokens in all: must be at most 262144"):
        decode_resume(message)
    many = inference_pb2.Resume(outputs=[inference_pb2.TokenIds()] * (MAX_CHOICES + 1))
    with pytest.raises(InvalidRequestError, match="129 entries: must be at most 128"):
        decode_resume(many)
