"""The cost model against figures by hand, and the shapes it takes from configurations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate.cost import CostConstants, CostModel, visible_pairs
from benchmarks.simulate.hardware import GPUS, Device
from benchmarks.simulate.model_shape import PRESETS, read_model_config
from runtime.errors import ConfigError
from tests.simulation import FLOOR, TINY, decode_step, lens, make_deployment

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("gemma-3-270m", 268_098_176),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, num_params: int) -> None:
    assert PRESETS[name].num_params == num_params


@pytest.mark.parametrize(("name", "floor_ms"), [("qwen3-0.6b", 6.5), ("llama-3.1-8b", 10.5)])
def test_a_decode_step_of_256_at_1k_context_cannot_beat_the_memory(
    name: str, floor_ms: float
) -> None:
    shape, h200 = PRESETS[name], GPUS["H200"]
    floor = decode_step(CostModel(shape, h200, constants=FLOOR), rows=256, context=1024)
    kv_bytes = 256 * 1024 * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 2
    read_s = (shape.step_weight_bytes + kv_bytes) / 4.8e12
    assert 1e3 * floor.total_s >= floor_ms
    assert read_s <= floor.total_s < 1.12 * read_s
    stated = decode_step(CostModel(shape, h200), rows=256, context=1024)
    assert stated.total_s > floor.total_s / 0.8


def test_weights_bound_a_step_of_few_tokens_and_arithmetic_one_of_many() -> None:
    device = Device(name="toy", memory_bytes=1 << 30, bandwidth=1e9, flops=1e9)
    cost = CostModel(TINY, device, constants=FLOOR)
    # By layer: 16 x (2 x 4 x 8 + 2 x 2 x 8) + 3 x 16 x 32 weights; norms; the head.
    layers, norms, head = 2 * (16 * 96 + 1536), 2 * 2 * 16 + 16, 100 * 16
    few = cost.step(lens(0), lens(1), num_samples=1)
    assert few.linear_s == pytest.approx(
        max(2 * (layers + norms + head), 2 * (layers + head)) / 1e9
    )
    many = cost.step(lens(0), lens(50), num_samples=1)
    assert many.linear_s == pytest.approx(2 * (50 * layers + head) / 1e9)


def test_attention_reads_and_multiplies_what_is_visible() -> None:
    device = Device(name="toy", memory_bytes=1 << 30, bandwidth=1e9, flops=1e18)
    token_bytes = 2 * 2 * 8 * 2
    # 3 tokens after 5: 8 keys for the full layer, 4 + 2 for the window of 4; 3 are written to both.
    step = CostModel(TINY, device, constants=FLOOR).step(lens(5), lens(3), num_samples=1)
    assert step.attention_s == pytest.approx((8 + 6 + 2 * 3) * token_bytes / 1e9)
    slow = replace(device, bandwidth=1e18, flops=1e9)
    step = CostModel(TINY, slow, constants=FLOOR).step(lens(5), lens(3), num_samples=1)
    assert step.attention_s == pytest.approx(((6 + 7 + 8) + (4 + 4 + 4)) * 4 * 4 * 8 / 1e9)


def test_decodes_cost_the_same_alone_and_beside_a_chunk() -> None:
    device = Device(name="toy", memory_bytes=1 << 30, bandwidth=1e18, flops=1e9)
    cost = CostModel(TINY, device, constants=FLOOR)
    decodes = cost.step(lens(9, 2), lens(1, 1), num_samples=2).attention_s
    chunk = cost.step(lens(0), lens(7), num_samples=0).attention_s
    both = cost.step(lens(9, 2, 0), lens(1, 1, 7), num_samples=2).attention_s
    assert both == pytest.approx(decodes + chunk)


@pytest.mark.parametrize("window", [1, 4, 7, 1 << 30])
def test_visible_pairs_are_those_counted_one_by_one(window: int) -> None:
    cases = [(0, 1), (0, 9), (3, 5), (20, 1), (6, 2)]
    counted = sum(min(before + i + 1, window) for before, count in cases for i in range(count))
    before, counts = zip(*cases, strict=True)
    assert visible_pairs(lens(*before), lens(*counts), window) == counted


def test_ranks_share_the_work_and_pay_for_collectives() -> None:
    device = Device(
        name="toy",
        memory_bytes=1 << 30,
        bandwidth=1e9,
        flops=1e18,
        link_bandwidth=1e6,
        link_latency_s=1e-3,
    )
    alone, two = (CostModel(TINY, device, tp=tp, constants=FLOOR) for tp in (1, 2))
    one_step = alone.step(lens(5, 9), lens(1, 1), num_samples=2)
    step = two.step(lens(5, 9), lens(1, 1), num_samples=2)
    assert step.linear_s == pytest.approx(one_step.linear_s / 2)
    assert step.attention_s == pytest.approx(one_step.attention_s / 2)
    # 5 all-reduces of 2 tokens x 16 x 2 bytes, both ways; a gather of 2 x 100 float32; half stays.
    assert step.collective_s == pytest.approx(6e-3 + (2 * 5 * 64 + 800) / 2 / 1e6)
    assert one_step.collective_s == 0


def test_kv_heads_are_replicated_where_there_are_fewer_than_ranks() -> None:
    assert [TINY.cache_specs(tp)[0].num_kv_heads for tp in (1, 2, 4)] == [2, 1, 1]


def test_refuses_tp_that_does_not_divide_or_has_no_link() -> None:
    with pytest.raises(ConfigError, match="tp=3 must divide the 4 attention heads"):
        CostModel(TINY, GPUS["H200"], tp=3)
    with pytest.raises(ConfigError, match="tp=2 needs a link"):
        CostModel(TINY, Device(name="x", memory_bytes=1, bandwidth=1, flops=1), tp=2)


def test_refuses_an_efficiency_over_one() -> None:
    with pytest.raises(ConfigError, match=r"flop_efficiency=1.2 must be in \(0, 1\]"):
        CostConstants(flop_efficiency=1.2)


def write_config(folder: Path, **values: object) -> Path:
    path = folder / "config.json"
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
    }
    kept = {name: value for name, value in {**config, **values}.items() if value is not None}
    path.write_text(json.dumps(kept))
    return path


def test_reads_a_config(tmp_path: Path) -> None:
    shape = read_model_config(write_config(tmp_path, torch_dtype="float32"))
    assert (shape.head_dim, shape.windows, shape.tied) == (16, (0,) * 6, False)
    assert shape.element_bytes == 4


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 6),
        ({"model_type": "mistral", "sliding_window": None}, (0,) * 6),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": False}, (0,) * 6),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 4}, (0, 0, 0, 0, 8, 8)),
        ({"model_type": "gemma2", "sliding_window": 8}, (8, 0) * 3),
        (
            {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 3},
            (8, 8, 0, 8, 8, 0),
        ),
        (
            {
                "model_type": "gemma2",
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 3,
            },
            (0, 8) * 3,
        ),
    ],
)
def test_reads_the_windows(
    tmp_path: Path, values: dict[str, object], windows: tuple[int, ...]
) -> None:
    assert read_model_config(write_config(tmp_path, **values)).windows == windows


def test_reads_the_decoder_of_a_model_that_sees(tmp_path: Path) -> None:
    inner = json.loads(write_config(tmp_path).read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": inner}))
    assert read_model_config(path).tied


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral'"),
        ({"vocab_size": None}, "key 'vocab_size' is missing"),
        ({"dtype": "int4"}, "dtype='int4'"),
    ],
)
def test_refuses_a_config_it_would_have_to_guess(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config(write_config(tmp_path, **values))


def test_a_model_that_does_not_fit_says_so() -> None:
    with pytest.raises(ConfigError, match="raise --tp"):
        make_deployment(shape=PRESETS["llama-3.1-70b"])
    assert make_deployment(shape=PRESETS["llama-3.1-70b"], tp=2).layout.num_blocks > 0


def test_the_cache_gets_what_the_weights_leave() -> None:
    deployment = make_deployment(kv_memory=None, max_num_seqs=512, max_num_batched_tokens=512)
    left = int(0.9 * 141e9) - PRESETS["qwen3-0.6b"].weight_bytes
    assert deployment.layout.num_blocks == left // deployment.layout.block_bytes
