"""Models that are made without a checkpoint, to measure with."""

from pathlib import Path

import pytest
import torch

from tests.families import FAMILIES
from tests.tiny_models import Row, load_executor, make_batch, make_layout

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "gpt2"])
def test_a_configuration_alone_runs(family: str, tmp_path: Path) -> None:
    """A dry pass at load has found that no weight is missing; here the logits are numbers."""
    FAMILIES[family]().save_pretrained(tmp_path)
    executor = load_executor(tmp_path, dtype="float32", random_weights=True)
    layout = make_layout(executor.spec)
    executor.allocate_cache(layout)

    logits = executor.compute_logits(
        make_batch(
            [
                Row(
                    sequence_id=1,
                    tokens=[3, 4, 5],
                    seq_len=0,
                    block_tables=[[1] for _ in layout.groups],
                    sample=range(3),
                )
            ]
        )
    )

    assert logits is not None
    assert logits.isfinite().all()
    assert logits.std() > 1e-4
    assert not torch.equal(logits[0], logits[1])
