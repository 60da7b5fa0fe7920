"""Decoders beyond the families of test_equality: the same comparison on one shrunk config each."""

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from tests.ranks import EXPECTED, Finding, examine, run_ranks
from tests.tiny_models import BOUND, FAMILIES, SIZES, expect, load_executor, save_random
from workers.errors import ModelError
from workers.models.build import CHECKED_CLASSES
from workers.parallel import TensorParallel, Topology

pytestmark = [pytest.mark.cpu, pytest.mark.full]

# Whole, and cut over two ranks.
CUT = (
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gpt_neox",
    "helium",
    "hyperclovax",
    "jais2",
    "ministral",
    "ministral3",
    "nanochat",
    "olmo",
    "phi",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
)
# Refused at more than one rank.
WHOLE = (
    "biogpt",
    "bitnet",
    "glm",
    "glm4",
    "hunyuan_v1_dense",
    "olmo2",
    "olmo3",
    "opt",
    "persimmon",
    "phi3",
)
CHANGES = {
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "cohere2": {"sliding_window": 6},
    "exaone4": {"sliding_window": 6},
    "olmo3": {"sliding_window": 6},
    "ministral": {"sliding_window": 6, "head_dim": 16},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "starcoder2": {"sliding_window": 6},
}


def make_config(kind: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[kind](**SIZES | {"pad_token_id": 0} | CHANGES.get(kind, {}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {}
    for kind in (*CUT, *WHOLE):
        made[kind] = save_random(root / kind, make_config(kind))
        torch.save(expect(made[kind]), made[kind] / EXPECTED)
    return made


@pytest.fixture(scope="module")
def on_two(folders, tmp_path_factory) -> dict[str, list[Finding]]:
    return run_ranks([folders[kind] for kind in CUT], 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("kind", [*CUT, *WHOLE])
def test_one_rank_equals_transformers(folders, kind):
    alone = examine(folders[kind])

    assert alone.error < BOUND
    assert alone.greedy_equal


@pytest.mark.parametrize("kind", CUT)
def test_two_ranks_equal_transformers(on_two, kind):
    sampler, _ = on_two[kind]

    assert sampler.error < BOUND
    assert sampler.greedy_equal


@pytest.mark.parametrize("kind", WHOLE)
def test_the_others_are_refused_on_two_ranks(folders, kind):
    with pytest.raises(ModelError, match="serve it with --tp 1"):
        load_executor(folders[kind], TensorParallel(Topology(tp=2), 0, None))


def test_these_and_the_families_start_without_a_warning():
    configs = [*map(make_config, (*CUT, *WHOLE)), *(make() for make in FAMILIES.values())]

    assert {MODEL_FOR_CAUSAL_LM_MAPPING[type(c)].__name__ for c in configs} == CHECKED_CLASSES
