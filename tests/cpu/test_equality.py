"""Our models give what transformers gives, alone and cut over ranks."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.model_gate import TESTED_TYPES
from tests.families import FAMILIES, TYPES, VOCABULARY
from tests.quick import quick
from tests.ranks import EXPECTED, Finding, examine, run_ranks
from tests.tiny_models import (
    BOUND,
    Feeder,
    error_in_std,
    expect,
    forced_logits,
    load_executor,
    make_batch,
    save_tiny_model,
)
from workers.attention import reference
from workers.errors import ModelError
from workers.parallel import TensorParallel, Topology

pytestmark = pytest.mark.cpu

FOUR_RANKS = ["llama", "llama-one-kv-head", "gemma3", "gpt_oss"]
# One of each way to attend and to be cut over ranks; phi3's projections are joined.
QUICK = [*FOUR_RANKS, "deepseek_v3", "phi3"]

every_family = pytest.mark.parametrize("family", quick(FAMILIES, *QUICK))


class ByFamily(dict[str, Any]):
    """Made for a group of families when the first of them is asked for."""

    def __init__(
        self, make: Callable[[Sequence[str]], Mapping[str, Any]], *groups: Sequence[str]
    ) -> None:
        super().__init__()
        self._make = make
        self._groups = groups

    def __missing__(self, family: str) -> Any:
        group = next(each for each in self._groups if family in each)
        self.update(self._make(group))
        return self[family]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> ByFamily:
    root = tmp_path_factory.mktemp("models")

    def make(families: Sequence[str]) -> dict[str, Path]:
        made = {family: save_tiny_model(root / family, family) for family in families}
        for folder in made.values():
            torch.save(expect(folder), folder / EXPECTED)
        return made

    return ByFamily(make, *([family] for family in FAMILIES))


@pytest.fixture(scope="module")
def alone(folders) -> ByFamily:
    return ByFamily(
        lambda families: {family: examine(folders[family]) for family in families},
        *([family] for family in FAMILIES),
    )


@pytest.fixture(scope="module")
def on_two(folders, tmp_path_factory) -> ByFamily:
    """Two processes for the quick ones, and two for the rest."""

    def run(families: Sequence[str]) -> dict[str, list[Finding]]:
        made = [folders[family] for family in families]
        return run_ranks(made, 2, tmp_path_factory.mktemp("two"))

    return ByFamily(run, QUICK, [family for family in FAMILIES if family not in QUICK])


@pytest.fixture(scope="module")
def on_four(folders, tmp_path_factory):
    return run_ranks([folders[family] for family in FOUR_RANKS], 4, tmp_path_factory.mktemp("four"))


@every_family
def test_one_rank_equals_transformers(alone, family):
    assert alone[family].error < BOUND
    assert alone[family].greedy_equal


@every_family
def test_two_ranks_equal_transformers(on_two, family):
    sampler, _ = on_two[family]

    assert sampler.error < BOUND
    assert sampler.greedy_equal


@pytest.mark.full
@pytest.mark.parametrize("family", FOUR_RANKS)
def test_four_ranks_equal_transformers(on_four, family):
    sampler = on_four[family][0]

    assert sampler.error < BOUND
    assert sampler.greedy_equal


@every_family
def test_the_comparison_can_fail(folders, family, monkeypatch):
    """A hidden previous key moves the logits of every family far beyond the bound."""

    def hide_previous(seq_len, query_len, first, window, chunk, device):
        queries = torch.arange(seq_len, seq_len + query_len)[:, None]
        keys = torch.arange(first, seq_len + query_len)
        seen = (keys <= queries) & (keys != queries - 1)
        if chunk:
            return seen & (keys >= queries // chunk * chunk)
        return seen & (keys > queries - window) if window else seen

    monkeypatch.setattr(reference, "_visible", hide_previous)
    expected = torch.load(folders[family] / EXPECTED, weights_only=False)
    feeder = Feeder(load_executor(folders[family], attention="reference"))

    logits = forced_logits(feeder, expected.texts)

    assert error_in_std(logits, expected.logits) > 100 * BOUND


@every_family
def test_batch_mates_never_interact(folders, family):
    """Logits beside a sequence that is 50 times as long are those alone."""
    draw = random.Random(5)
    short, long = ([draw.randrange(VOCABULARY) for _ in range(length)] for length in (5, 250))

    def logits_of(*texts):
        feeder = Feeder(load_executor(folders[family]), num_blocks=1024)
        rows = [feeder.row(n, text, sample=range(len(text))) for n, text in enumerate(texts)]
        return feeder.executor.compute_logits(make_batch(rows)).split([*map(len, texts)])

    (alone,) = logits_of(short)
    together, _ = logits_of(short, long)

    assert error_in_std([together], [alone]) < BOUND


@every_family
def test_a_rank_never_holds_the_full_weights(alone, on_two, family):
    whole = alone[family]
    for rank in on_two[family]:
        assert rank.parameter_bytes < 0.7 * whole.parameter_bytes
        assert rank.read_bytes < 0.7 * whole.read_bytes


def test_kv_heads_are_split_or_replicated(on_two):
    assert [rank.kv_heads for rank in on_two["llama"]] == [[1, 1, 1]] * 2
    assert [rank.kv_heads for rank in on_two["llama-one-kv-head"]] == [[1, 1, 1]] * 2
    assert [rank.kv_heads for rank in on_two["deepseek_v3"]] == [[2, 2, 2]] * 2


def test_what_is_served_without_a_test_of_its_own_is_tested_here():
    assert TYPES == TESTED_TYPES


@pytest.mark.parametrize(
    ("family", "tp", "changes", "sentence"),
    [
        (
            "llama",
            3,
            {},
            "4 attention heads can't be split over tp=3 ranks: use a tp that divides 4",
        ),
        (
            "llama",
            4,
            {"intermediate_size": 98},
            "model.layers.0.mlp.gate_proj: 98 outputs can't be split over tp=4 ranks: "
            "use a tp that divides 98",
        ),
        (
            "llama",
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4, "hidden_size": 48},
            "3 KV heads can't be split over tp=4 ranks: use a tp that divides 3 "
            "or is a multiple of it",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path, family, tp, changes, sentence):
    folder = save_tiny_model(tmp_path, family, **changes)

    with pytest.raises(ModelError) as refused:
        load_executor(folder, TensorParallel(Topology(tp=tp), 0, None))

    assert str(refused.value) == sentence
