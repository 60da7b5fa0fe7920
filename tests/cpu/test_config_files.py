"""What is taken from the files beside the weights."""

import json

import pytest
import torch
from transformers import Gemma3Config, LlamaConfig

from tests.families import PADDED, SIZES
from workers.errors import ModelError
from workers.gate import strict
from workers.models.config import eos_token_ids, read_config, resolve_dtype, text_part

pytestmark = pytest.mark.cpu


def test_a_whole_checkpoint_says_what_ends_a_text(tmp_path):
    """Its text part's own id may be another."""
    config = Gemma3Config(text_config=PADDED | {"eos_token_id": 1}, eos_token_id=[1, 106])

    assert eos_token_ids(tmp_path, config) == (1, 106)

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert eos_token_ids(tmp_path, config) == (7,)


def test_the_number_format_is_the_first_that_is_told():
    silent, told = LlamaConfig(**SIZES), LlamaConfig(**SIZES, dtype="bfloat16")

    assert resolve_dtype("auto", (silent, told), torch.float16) == torch.bfloat16
    assert resolve_dtype("auto", (silent, silent), torch.float16) == torch.float16
    assert resolve_dtype("float32", (told,), torch.float16) == torch.float32


def test_a_checkpoint_that_brings_its_own_code_is_refused_without_advice_to_run_it(tmp_path):
    config = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match="'kimi_k2' needs code of the checkpoint") as refused:
        text_part(read_config(tmp_path))
    assert "trust_remote_code" not in str(refused.value)


def test_logits_that_are_no_numbers_are_as_wrong_as_can_be():
    expected = torch.randn(4, 8)
    found = expected.clone()
    found[2, 3] = float("nan")

    assert strict._error(found, expected) == float("inf")
    assert strict._error(expected, expected) == 0
