"""The models that engines are compared on."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks.__main__ import benchmarks
from benchmarks.make_model import TINY_VOCABULARY

pytestmark = pytest.mark.cpu


def make(folder: Path) -> str:
    return CliRunner().invoke(benchmarks, ["make-model", "tiny", str(folder)]).output


def test_a_model_is_the_same_each_time_and_has_a_tokenizer(tmp_path: Path) -> None:
    torch.manual_seed(3)
    make(tmp_path / "one")
    make(tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert {each.dtype for each in one.values()} == {torch.bfloat16}
    tokenizer = Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY_VOCABULARY
    assert (tmp_path / "one" / "tokenizer.model").stat().st_size > TINY_VOCABULARY
    assert "already exists" in make(tmp_path / "one")
