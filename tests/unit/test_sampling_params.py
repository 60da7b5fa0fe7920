import math
from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequestError
from runtime.sampling_params import CompleteParams, SamplingDefaults, SamplingParams, fork_seed

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens=0 must be at least 1"),
        ("max_tokens", -3, "max_tokens=-3 must be at least 1"),
        ("max_tokens", 2**31, "at most 2147483647"),
        ("temperature", -0.1, "temperature=-0.1 must be 0"),
        ("temperature", math.nan, "temperature=nan must be 0"),
        ("temperature", math.inf, "temperature=inf must be 0"),
        ("temperature", 1e-30, "temperature=1e-30 must be 0"),
        ("top_p", 0.0, r"top_p=0.0 must be in \[1e-09, 1\]"),
        ("top_p", 1.5, r"top_p=1.5 must be in \[1e-09, 1\]"),
        ("top_p", 1e-46, "top_p=1e-46 must be in"),  # 0 in float32
        ("top_p", math.nan, "top_p=nan must be in"),
        ("top_k", -1, "top_k=-1 must be at least 0"),
        ("top_k", 2**31, "at most 2147483647"),
        ("max_tokens", 2.5, "max_tokens=2.5 is of type float: must be int"),
        ("max_tokens", "3", "max_tokens='3' is of type str: must be int"),
        ("top_k", True, "top_k=True is of type bool: must be int"),
        ("temperature", "1", "temperature='1' is of type str: must be float"),
        ("seed", 1.5, r"seed=1.5 is of type float: must be int | None"),
        ("ignore_eos", 1, "ignore_eos=1 is of type int: must be bool"),
        ("seed", -1, r"seed=-1 must be in \[0, 2\*\*64\)"),
        ("seed", 2**64, "must be in"),
        ("n", 0, r"n=0 must be in \[1, 128\]"),
        ("n", 129, r"n=129 must be in \[1, 128\]"),
        ("n", None, "n=None is of type NoneType: must be int"),
        ("min_tokens", -1, "min_tokens=-1 must be at least 0 and at most max_tokens$"),
        ("min_tokens", 1.0, "min_tokens=1.0 is of type float: must be int"),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: float, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**{field: value})


def test_the_edges_are_fine() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, seed=0)
    SamplingParams(max_tokens=2**31 - 1, temperature=1e5, top_k=2**31 - 1, top_p=1e-9)
    SamplingParams(seed=2**64 - 1)
    SamplingParams(n=1, min_tokens=0)
    SamplingParams(n=128, max_tokens=7, min_tokens=7)


DEFAULTS = SamplingDefaults(
    max_tokens=5, temperature=0.6, top_k=50, top_p=0.9, min_p=0.1, repetition_penalty=1.2
)


def test_what_is_unset_takes_the_default_and_what_is_set_stays() -> None:
    complete = SamplingParams(temperature=1.0, top_k=0, seed=7, stop=("x",)).complete(DEFAULTS)
    assert complete == CompleteParams(
        max_tokens=5,
        temperature=1.0,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        seed=7,
        stop=("x",),
    )
    assert complete.complete(SamplingDefaults()) == complete


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingDefaults)])
def test_complete_parameters_leave_nothing_unset(name: str) -> None:
    assert getattr(SamplingParams(), name) is None
    values = asdict(DEFAULTS)
    with pytest.raises(InvalidRequestError, match=f"{name}=None is of type NoneType"):
        CompleteParams(**values | {name: None})
    assert getattr(SamplingParams().complete(DEFAULTS), name) == values[name]


def test_min_tokens_are_at_most_max_tokens_whoever_sets_those() -> None:
    message = "min_tokens=6 must be at least 0 and at most max_tokens=5"
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(min_tokens=6, max_tokens=5)
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(min_tokens=6).complete(DEFAULTS)


def test_the_seeds_of_choices_are_splitmix64s_numbers() -> None:
    # The test vector that goes with the generator: its first five numbers from 1234567.
    assert [fork_seed(1234567, index) for index in range(6)] == [
        1234567,
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**16))
def test_seeds_of_choices_are_seeds_and_differ(seed: int, distance: int) -> None:
    seeds = [
        fork_seed(each % 2**64, index) for each in (seed, seed + distance) for index in (0, 1, 127)
    ]
    assert len(set(seeds)) == len(seeds)
    for each in seeds:
        SamplingParams(seed=each)
