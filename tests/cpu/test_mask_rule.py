"""Windows and chunks are found in a model's mask function; other masks are refused."""

import pytest
import torch

from workers.errors import ModelError
from workers.layers.mask_rule import MaskFunction, Reach, find_reach

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
NUM_POSITIONS = (1, 2, 3, 7, 64, 100)


def causal(batch, head, query, key):
    return key <= query


def windowed(window: int) -> MaskFunction:
    return lambda batch, head, query, key: (key <= query) & (key > query - window)


def chunked(chunk: int) -> MaskFunction:
    return lambda batch, head, query, key: (key <= query) & (key // chunk == query // chunk)


def sizes(num_positions: int) -> list[int]:
    around = (1, 2, 3, num_positions // 2, *range(num_positions - 1, num_positions + 3), 10**6)
    return sorted({size for size in around if size > 0})


@pytest.mark.parametrize("num_positions", NUM_POSITIONS)
def test_a_causal_rule_has_no_limit(num_positions):
    assert find_reach(causal, num_positions, CPU) == Reach()


@pytest.mark.parametrize("num_positions", NUM_POSITIONS)
def test_a_window_is_found_where_it_ends(num_positions):
    for window in sizes(num_positions):
        reach = find_reach(windowed(window), num_positions, CPU)
        assert reach == Reach(window=window if window < num_positions else 0), window


@pytest.mark.parametrize("num_positions", NUM_POSITIONS)
def test_a_chunk_is_found_where_it_ends(num_positions):
    for chunk in sizes(num_positions):
        reach = find_reach(chunked(chunk), num_positions, CPU)
        if chunk >= num_positions:
            assert reach == Reach(), chunk
        elif chunk == 1:  # as a window of 1
            assert reach == Reach(window=1)
        else:
            assert reach == Reach(chunk=chunk), chunk


@pytest.mark.parametrize("size", [2, 3, 8, 99])
def test_a_found_rule_is_the_rule(size):
    """What is found stands for the mask function: both say the same of every pair."""
    places = torch.arange(100)
    query, key = places.unsqueeze(1), places.unsqueeze(0)
    for rule in (windowed(size), chunked(size)):
        reach = find_reach(rule, 100, CPU)
        found = windowed(reach.window) if reach.window else chunked(reach.chunk)
        assert torch.equal(rule(0, 0, query, key), found(0, 0, query, key))


@pytest.mark.parametrize(
    "rule",
    [
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: torch.tensor(True),
        lambda batch, head, query, key: key < 0,
        lambda batch, head, query, key: (query - key).abs() < 5,
        lambda batch, head, query, key: (key <= query) | (key < 10),
        lambda batch, head, query, key: (key <= query) | (key < 99),
        lambda batch, head, query, key: (key <= query) & ((key > query - 4) | (key < 2)),
        lambda batch, head, query, key: (key <= query) & (key % 2 == query % 2),
        lambda batch, head, query, key: (key <= query) & (key != 50),
        lambda batch, head, query, key: key < query,
        lambda batch, head, query, key: (key <= query) & (key // 8 == query // 8) & (key > 2),
        lambda batch, head, query, key: (key <= query) & (key >= query // 2),
        lambda batch, head, query, key: (key <= query) & (key // 8 >= query // 8 - 1),
    ],
    ids=[
        "all",
        "always",
        "never",
        "both-ways",
        "prefix",
        "long-prefix",
        "window-and-sinks",
        "strided",
        "a-hole",
        "without-itself",
        "late-start",
        "growing-window",
        "chunk-and-the-one-before",
    ],
)
def test_other_rules_are_refused(rule):
    with pytest.raises(ModelError, match=r"neither causal nor|neither a window nor"):
        find_reach(rule, 100, CPU)
