"""Windows and chunks are found in a model's mask function; other masks are refused."""

import pytest
import torch

from workers.errors import ModelError
from workers.layers.mask_rule import Reach, find_reach

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


def causal(batch, head, query, key):
    return key <= query


@pytest.mark.parametrize("window", [1, 2, 5, 99])
def test_a_window_is_found(window):
    def windowed(batch, head, query, key):
        return (key <= query) & (key > query - window)

    assert find_reach(windowed, 100, CPU) == Reach(window=window)
    assert find_reach(windowed, window, CPU) == Reach()


@pytest.mark.parametrize("chunk", [2, 3, 8, 50, 99])
def test_a_chunk_is_found(chunk):
    def chunked(batch, head, query, key):
        return (key <= query) & (key // chunk == query // chunk)

    assert find_reach(chunked, 100, CPU) == Reach(chunk=chunk)
    assert find_reach(chunked, chunk, CPU) == Reach()


def test_a_causal_rule_has_neither():
    assert find_reach(causal, 100, CPU) == Reach()


@pytest.mark.parametrize(
    "rule",
    [
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: (key <= query) & ((key > query - 4) | (key < 2)),
        lambda batch, head, query, key: (key <= query) & (key % 2 == query % 2),
        lambda batch, head, query, key: (query - key).abs() < 5,
        lambda batch, head, query, key: (key <= query) & (key // 8 == query // 8) & (key > 2),
    ],
    ids=["all", "sinks", "strided", "both-ways", "late-start"],
)
def test_other_rules_are_refused(rule):
    with pytest.raises(ModelError, match=r"neither causal nor|neither a window nor"):
        find_reach(rule, 100, CPU)
