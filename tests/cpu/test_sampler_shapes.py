"""Tokens are the same, whether a text was computed at once or token by token."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.builders import demo_model_folder
from tests.sampling import make_columns, make_inputs
from workers.batch import NO_MASKS
from workers.sampling.sampler import Sampler

pytestmark = [pytest.mark.cpu, pytest.mark.full, pytest.mark.timeout(300)]

NUM_TOKENS = 125
NUM_SEEDS = 16


def draw(logits: torch.Tensor, seed: int, **columns: float) -> torch.Tensor:
    count = len(logits)
    asked = make_columns(count, seed=seed, **columns)
    return Sampler([]).sample(logits, torch.arange(count), asked, make_inputs(), NO_MASKS).token_ids


@pytest.fixture(scope="module")
def two_shapes() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [NUM_TOKENS, V] of a text that the embedded model writes: at once, and by steps."""
    model = AutoModelForCausalLM.from_pretrained(demo_model_folder(), dtype=torch.float32)
    text, steps, cache = [2], [], None
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            output = model(torch.tensor([text[-1:]]), cache=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits[0, -1].float())
            text.append(int(draw(steps[-1][None], seed=len(text))))
        at_once = model(torch.tensor([text[:-1]]), use_cache=False).logits[0].float()
    return at_once, torch.stack(steps)


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.95, "min_p": 0.001, "temperature": 1.5},
    ],
)
def test_no_token_of_2000_draws_differs(two_shapes, columns):
    at_once, steps = two_shapes
    difference = (at_once - steps).abs().max()
    assert 0 < difference < 1e-3

    drawn = torch.stack([draw(at_once, seed, **columns) for seed in range(NUM_SEEDS)])
    again = torch.stack([draw(steps, seed, **columns) for seed in range(NUM_SEEDS)])

    assert drawn.numel() == 2000
    assert len(drawn.unique()) > 100
    assert int((drawn != again).sum()) == 0
