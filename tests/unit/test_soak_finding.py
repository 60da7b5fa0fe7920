"""What a soak's finding says is wrong."""

from dataclasses import replace

import pytest

from benchmarks.soak.asks import (
    BEGINNINGS,
    KINDS,
    MAX_MODEL_LEN,
    MAX_TAIL,
    MAX_TOKENS,
    WORDS,
    Ask,
    find_fault,
    make_probes,
)
from benchmarks.soak.client import Answer
from benchmarks.soak.finding import Finding, Growth
from benchmarks.soak.traffic import MAX_KEPT_FAULTS, Log
from protos import common_pb2

pytestmark = pytest.mark.unit

FLAT = [100.0] * 40
STATS = common_pb2.EngineStats(epoch=1, num_preemptions=7)
GOOD = Finding(
    seconds=1800.0,
    log=Log(),
    num_gaps=3,
    leaks=(),
    megabytes={"driver": FLAT, "rank 0": FLAT},
    stats=STATS,
)


def faulty_log(count: int) -> Log:
    log = Log()
    for number in range(count):
        log.add_fault(f"greedy, grpc: {number}")
    return log


def test_a_good_one_has_no_fault() -> None:
    assert GOOD.faults() == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"leaks": ["gap 2: 3 blocks"]}, "left in a gap: gap 2: 3 blocks"),
        ({"log": faulty_log(1)}, "greedy, grpc: 0"),
        (
            {"stats": common_pb2.EngineStats(epoch=2, num_preemptions=7)},
            "the workers were started again: epoch 2",
        ),
        (
            {"stats": common_pb2.EngineStats(epoch=1)},
            "no sequence was preempted: the pool is too large to show anything",
        ),
        (
            {"megabytes": {"driver": FLAT, "rank 0": [100.0] * 20 + [109.0] * 20}},
            "rank 0 grew by 9.0 MB, from 100 MB",
        ),
    ],
    ids=["leak", "request", "epoch", "preemptions", "memory"],
)
def test_a_fault_is_told(changes: dict[str, object], fault: str) -> None:
    assert replace(GOOD, **changes).faults() == [fault]


def test_a_short_soak_doesnt_judge_memory() -> None:
    assert replace(GOOD, seconds=60.0, megabytes={"driver": [0.0, 1.0, 2.0, 900.0]}).faults() == []


def test_many_faults_are_counted() -> None:
    faults = replace(GOOD, log=faulty_log(MAX_KEPT_FAULTS + 3)).faults()
    assert len(faults) == MAX_KEPT_FAULTS + 1
    assert faults[-1] == "and 3 more requests"


def test_growth_leaves_the_first_quarter_out() -> None:
    growth = Growth.of([1.0] * 10 + [100.0] * 10 + [500.0] * 10 + [107.0] * 10)
    assert (growth.before, growth.after, growth.megabytes) == (100.0, 107.0, 7.0)
    assert growth.is_flat
    assert Growth(before=1000.0, after=1019.0).is_flat
    assert not Growth(before=1000.0, after=1021.0).is_flat
    with pytest.raises(ValueError, match="3 looks at the memory must be at least 4"):
        Growth.of([1.0] * 3)


def test_probes_are_the_same_every_time_and_of_each_kind() -> None:
    assert make_probes(26) == make_probes(26)
    assert {probe.kind for probe in make_probes(26)} == set(KINDS)


def test_no_request_is_too_long() -> None:
    longest = max(map(len, BEGINNINGS)) + MAX_TAIL * (1 + max(map(len, WORDS)))
    assert len("user: \n") + longest + max(MAX_TOKENS) <= MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("kind", "params", "text", "end", "fault"),
    [
        ("regex", {}, "abc-12", "stop", None),
        ("regex", {}, "abc-", "stop", "choice 0 is 'abc-'"),
        ("regex", {}, "abc-", "length", None),
        ("listed", {}, "second", "stop", None),
        ("listed", {}, "third", "stop", "choice 0 is 'third'"),
        ("schema", {}, '{"name": "a", "even": true}', "stop", None),
        ("schema", {}, '{"name": "a"', "stop", 'choice 0 is \'{"name": "a"\''),
        ("stop", {"stop": ["x"]}, "axb", "length", "choice 0 has a stop string: 'axb'"),
        ("greedy", {}, "a", "abort", "choice 0 ended by 'abort'"),
        ("choices", {"n": 2}, "a", "stop", "1 of 2 choices ended"),
    ],
)
def test_a_wrong_answer_is_found(
    kind: str, params: dict[str, object], text: str, end: str, fault: str | None
) -> None:
    ask = Ask(kind=kind, prompt="a", params=params)
    assert find_fault(ask, {0: text}, {0: end}) == fault


def test_answers_differ_in_text_end_or_ids() -> None:
    def make(text: str, ids: list[int], end: str = "stop") -> Answer:
        answer = Answer(ends={0: end})
        answer.texts[0] += text
        if ids:
            answer.token_ids[0] += ids
        return answer

    one = make("ab", [1, 2])
    assert not one.differs_from(make("ab", [1, 2]))
    assert not one.differs_from(make("ab", []))  # of HTTP
    assert one.differs_from(make("ac", []))
    assert one.differs_from(make("ab", [1, 3]))
    assert one.differs_from(make("ab", [1, 2], "length"))
