"""The ranks' specs become one model, if they agree."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from runtime.cluster.loaded_model import loaded_model
from runtime.errors import WorkerError
from tests.transport import model_spec
from workers.codec import encode_spec
from workers.config import LayerCacheSpec as WorkerSpec

pytestmark = pytest.mark.wire


def test_memory_is_that_of_the_poorest_rank_and_parameters_are_summed() -> None:
    specs = [
        encode_spec(model_spec(available_memory_bytes=500, parameter_bytes=70)),
        encode_spec(model_spec(available_memory_bytes=400, parameter_bytes=60)),
    ]

    model = loaded_model(specs)

    assert (model.available_memory_bytes, model.parameter_bytes) == (400, 130)
    assert (model.architecture, model.vocab_size) == ("FakeForCausalLM", 4096)
    assert model.eos_token_ids == (2,)
    assert [layer.k_dim for layer in model.layers] == [8, 8]


def test_every_field_of_a_layer_arrives() -> None:
    layers = tuple(
        WorkerSpec(window=window, chunk=chunk, num_kv_heads=3, k_dim=24, v_dim=16, element_bytes=2)
        for window, chunk in ((0, 8192), (512, 0))
    )

    model = loaded_model([encode_spec(model_spec(layers=layers))])

    assert [asdict(layer) for layer in model.layers] == [asdict(layer) for layer in layers]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 5000}, "ranks 0 and 1 .*: vocab_size is 4096 and 5000"),
        ({"eos_token_ids": (2, 3)}, r"eos_token_ids is \[2\] and \[2, 3\]"),
        ({"layers": model_spec().layers[:1]}, "2 and 1 layers"),
        (
            {"layers": (model_spec().layers[0], replace(model_spec().layers[1], window=9))},
            "layer 1 is .*window=0.* and .*window=9",
        ),
        (
            {"layers": (model_spec().layers[0], replace(model_spec().layers[1], chunk=9))},
            "layer 1 is .*chunk=0.* and .*chunk=9",
        ),
    ],
)
def test_ranks_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        loaded_model([encode_spec(model_spec()), encode_spec(model_spec(**changes))])
