"""Offline generation, and `lockstep generate`, on real worker processes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.errors import ConfigError, InvalidRequestError, UnavailableError
from runtime.llm import LLM
from runtime.request import FinishReason
from runtime.sampling_params import SamplingParams
from tests.families import VOCABULARY
from tests.quick import quick
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_tiny_model(tmp_path_factory.mktemp("llama"))
    with LLM(str(folder), progress=False) as llm:
        yield llm


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    lengths = [SamplingParams(max_tokens=n, temperature=0) for n in (9, 1, 4)]
    completions = llm.generate(prompts, lengths)
    assert [each.prompt_token_ids for each in completions] == [(1, 2, 3), (4,), (5, 6)]
    assert [len(each.token_ids) for each in completions] == [9, 1, 4]
    assert {each.finish_reason for each in completions} == {FinishReason.LENGTH}


def test_each_choice_is_what_its_seed_gives_alone(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4] * 20]
    params = SamplingParams(max_tokens=9, n=3, ignore_eos=True)
    completions = llm.generate(prompts, params, progress=False)
    assert [(list(each.prompt_token_ids), each.index) for each in completions] == [
        (prompt, index) for prompt in prompts for index in range(3)
    ]
    assert len({each.token_ids for each in completions}) > 2
    for each in completions:
        alone = SamplingParams(max_tokens=9, seed=each.seed, ignore_eos=True)
        (again,) = llm.generate([each.prompt_token_ids], alone, progress=False)
        assert (again.token_ids, again.seed) == (each.token_ids, each.seed)


def test_a_prompt_that_was_seen_is_read_from_the_cache_and_answered_alike(llm: LLM) -> None:
    prompt = list(range(3, 50))
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (first,) = llm.generate([prompt], params, progress=False)
    again, longer = llm.generate([prompt, [*prompt, *first.token_ids, 7]], params, progress=False)
    assert again.token_ids == first.token_ids
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert longer.num_cached_tokens == 48  # the answer was kept as well
    assert llm.stats().num_cached_blocks > 0


def test_a_stream_is_what_generate_gives(llm: LLM) -> None:
    chunks = list(llm.stream([1, 2, 3], GREEDY))
    (completion,) = llm.generate([[1, 2, 3]], GREEDY, progress=False)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == completion.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + [FinishReason.LENGTH]


def test_a_stream_that_is_closed_ends_its_request(llm: LLM) -> None:
    stream = llm.stream([1], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate([[1]], GREEDY, progress=False)
    assert llm.stats().num_running == 0


def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequestError, match=rf"prompts\[1\]: prompt token id {VOCABULARY}"):
        llm.generate([[1], [VOCABULARY]], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: .*tokenizer"):
        llm.generate("a text for a model without a tokenizer", GREEDY)
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: prompt is empty"):
        llm.generate([[1], ""], GREEDY)
    with pytest.raises(InvalidRequestError, match="params has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY])
    assert llm.stats().num_steps == steps


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1, float("nan")]], GREEDY, r"prompts\[0\]: prompt is neither a text nor a list"),
        ([[1.7, 2.2]], GREEDY, "neither a text nor a list of token ids"),
        ([1, 2, 3], GREEDY, "neither a text nor a list of token ids"),
        ([["1", "2"]], GREEDY, "neither a text nor a list of token ids"),
        ([[1]], {}, "params is of type dict"),
    ],
)
def test_what_is_no_request_is_refused_and_the_engine_lives(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, params, progress=False)
    llm.generate([[1]], GREEDY, progress=False)


@pytest.mark.parametrize("launcher", quick(["local", "ray"], "local"))
@pytest.mark.parametrize("end", quick(["", "raise ZeroDivisionError"], ""))
def test_a_program_that_forgets_to_close_ends_all_the_same(
    tmp_path: Path, launcher: str, end: str
) -> None:
    program = f"""
import psutil
from runtime import LLM
llm = LLM({str(save_tiny_model(tmp_path))!r}, tp=2, launcher={launcher!r}, progress=False)
stream = llm.stream([1, 2, 3])
next(stream)
for child in psutil.Process().children(recursive=True):
    print(child.pid)
{end}
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == (1 if end else 0), ran.stderr
    children = [int(line) for line in ran.stdout.split()]
    assert len(children) >= 2
    assert not any(is_running(pid) for pid in children)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.full
def test_a_second_ray_of_our_own_is_refused(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path))
    with LLM(model, launcher="ray", progress=False) as first:
        with pytest.raises(ConfigError, match="runs a Ray for another engine already"):
            LLM(model, launcher="ray", progress=False)
        first.generate([[1]], GREEDY, progress=False)


@pytest.mark.full
def test_a_closed_llm_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    before = set(psutil.Process().children(recursive=True))
    llm = LLM(str(save_tiny_model(tmp_path_factory.mktemp("llama"))), progress=False)
    llm.close()
    llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate([[1]], GREEDY)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.full
def test_generate_streams_to_the_terminal() -> None:
    command = [sys.executable, "-m", "runtime", "generate", "The three largest cities of Japan are"]
    options = ["--launcher=local", "--temperature=0", "--max-tokens=12"]
    ran = subprocess.run(
        command + options, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Tokyo" in ran.stdout
