"""Models small enough for tests, large enough for kernels; and what transformers makes of them."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.families import VOCABULARY
from tests.tiny_models import BOUND, Feeder, error_in_std, forced_logits
from workers.layers.lean import LeanLayer
from workers.layers.lean_run import LeanForward
from workers.model_executor import ModelExecutor

HEAD_DIM = 32  # as little as vectors divide in halves
TEXTS = [[(7 * place + 3) % VOCABULARY for place in range(length)] for length in (35, 19)]


def lean_layers(executor: ModelExecutor) -> list[LeanLayer]:
    forwards = [each.__dict__.get("forward") for each in executor._model.module.modules()]
    return [each.layer for each in forwards if isinstance(each, LeanForward)]


def plain_logits(folder: Path) -> list[torch.Tensor]:
    """Of transformers, with what the test has changed in its code."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in TEXTS]


def check_equal(executor: ModelExecutor, folder: Path) -> None:
    found = forced_logits(Feeder(executor), TEXTS)
    assert error_in_std(found, plain_logits(folder)) <= BOUND
