"""Checkpoints whose tensors are merged, split or turned on the way into the model."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from tests.checkpoints import Build, build_meta, change_tensors, cut, load, match, save_random
from tests.families import SIZES
from workers.loading import naming
from workers.loading.checkpoint import read_checkpoint
from workers.loading.conversion import Converted
from workers.loading.unread import UnreadTensor
from workers.parallel import Shard

pytestmark = pytest.mark.cpu

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def causal(model_type: str, **fields: object) -> Build:
    config = AutoConfig.for_model(model_type, **SIZES | fields)
    return lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def qwen3_vl_moe() -> PreTrainedModel:
    text = {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
    config = Qwen3VLMoeConfig(
        text_config=SIZES | text,
        vision_config=vision | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    )
    return Qwen3VLMoeForConditionalGeneration(config)


MODELS: dict[str, Build] = {
    "mixtral": causal("mixtral", num_local_experts=12),
    "qwen3-moe": causal("qwen3_moe", num_experts=4, moe_intermediate_size=24, head_dim=16),
    "deepseek-v3": causal(
        "deepseek_v3",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "olmoe": causal("olmoe", num_experts=4),
    "phimoe": causal("phimoe", num_local_experts=4),
    "sarvam-moe": causal("sarvam_moe", num_experts=4, moe_intermediate_size=24, head_dim=16),
    "qwen3-vl-moe": qwen3_vl_moe,
}

# On a Llama, each over other ways to put tensors together; the last two do more than move.
CONVERTERS: dict[str, WeightConverter] = {
    "qkv in one": WeightConverter(
        ["self_attn.qkv.weight"],
        ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        [Chunk(dim=0)],
    ),
    "columns apart": WeightConverter(
        ["mlp.left.weight", "mlp.right.weight"], "mlp.down_proj.weight", [Concatenate(dim=1)]
    ),
    "turned": WeightConverter(
        "self_attn.o_proj.turned", "self_attn.o_proj.weight", [Transpose(0, 1)]
    ),
    "turned and split": WeightConverter(
        "self_attn.kv.turned",
        ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        [Transpose(0, 1), Chunk(dim=0)],
    ),
    "row by row": WeightConverter(
        "mlp.rows.*.weight", "mlp.up_proj.weight", [MergeModulelist(dim=0)]
    ),
    "column by column": WeightConverter(
        "mlp.columns.*.weight", "mlp.up_proj.weight", [MergeModulelist(dim=1)]
    ),
    "interleaved": WeightConverter("mlp.mixed.weight", "mlp.up_proj.weight", [Interleave(dim=0)]),
    "interleaved and split": WeightConverter(
        "mlp.both.weight",
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        [Interleave(dim=0), Chunk(dim=0)],
    ),
}
WHOLE = {"interleaved", "interleaved and split"}


def some_shards(state: dict[str, torch.Tensor], seed: int) -> dict[str, Shard]:
    """Parts of every tensor: any dimension, one or two ranges, with and without padding."""
    draw = random.Random(seed)
    shards: dict[str, Shard] = {}
    for name, tensor in state.items():
        dim = draw.randrange(tensor.dim())
        marks = sorted(draw.randrange(tensor.shape[dim] + 1) for _ in range(4))
        ranges = ((marks[0], marks[1]), (marks[2], marks[3]))[: draw.randint(1, 2)]
        stored = sum(stop - start for start, stop in ranges)
        shards[name] = Shard(dim=dim, ranges=ranges, size=stored + draw.choice([0, 3]))
    return shards


def assert_equal(
    loaded: dict[str, torch.Tensor], state: dict[str, torch.Tensor], shards: dict[str, Shard]
) -> None:
    assert loaded.keys() == state.keys()
    for name, whole in state.items():
        assert torch.equal(loaded[name], cut(whole, shards.get(name))), name


def turn_experts(folder: Path) -> None:
    """As the published checkpoints have them: transformers saves them as the model does."""
    for file in folder.glob("model-*.safetensors"):
        experts = {
            name: tensor.transpose(1, 2).contiguous()
            for name, tensor in load_file(file).items()
            if ".experts." in name
        }
        change_tensors(file, **experts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and the tensors of a model, made when it is first asked for."""
    made: dict[str, tuple] = {}

    def save(name: str) -> tuple:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            # Experts of one layer come to lie in several files.
            made[name] = folder, save_random(MODELS[name], folder, shard_size="300KB")
            if name == "qwen3-vl-moe":
                turn_experts(folder)
        return made[name]

    return save


@pytest.mark.parametrize("name", MODELS)
def test_loaded_as_transformers_has_it(saved, name):
    folder, state = saved(name)

    assert_equal(load(MODELS[name], folder), state, {})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_gets_its_part_of_what_is_put_together(saved, name, seed):
    folder, state = saved(name)
    shards = some_shards(state, seed)

    assert_equal(load(MODELS[name], folder, shards), state, shards)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_converted_as_a_whole(saved, name):
    folder, _ = saved(name)

    sources = match(build_meta(MODELS[name]), folder)

    assert not [each for each in sources.values() if isinstance(each, Converted)]
    stored = {name: tensor.shape for name, tensor in read_checkpoint(folder).items()}
    assert stored != {name: source.shape for name, source in sources.items()}, "nothing to convert"


def test_what_lies_as_the_model_has_it_stays_so(tmp_path):
    state = save_random(qwen3_vl_moe, tmp_path)

    assert_equal(load(qwen3_vl_moe, tmp_path), state, {})


def test_experts_are_numbered_as_numbers(saved):
    """Of twelve, the third by name is the tenth."""
    folder, _ = saved("mixtral")

    source = match(build_meta(MODELS["mixtral"]), folder)[GATE_UP]

    assert isinstance(source, UnreadTensor)
    names = [piece.stored.name for piece in source.pieces]
    assert [name.split(".")[5] for name in names] == [str(number % 12) for number in range(24)]


def test_a_rank_reads_its_part_alone(saved):
    folder, state = saved("mixtral")
    shards = {
        name: Shard(
            dim=tensor.dim() - 1, ranges=((0, tensor.shape[-1] // 2),), size=tensor.shape[-1] // 2
        )
        for name, tensor in state.items()
    }
    reports: list[tuple[int, int]] = []

    load(MODELS["mixtral"], folder, shards, lambda *report: reports.append(report))

    whole = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert {total for _, total in reports} == {whole // 2}
    assert reports[-1] == (whole // 2, whole // 2)
    assert [loaded for loaded, _ in reports] == sorted({loaded for loaded, _ in reports})


@pytest.fixture(params=CONVERTERS)
def converted(request, tmp_path, monkeypatch):
    """A Llama stored for one of the converters: its name, its folder, its tensors."""
    name = request.param
    build = causal("llama")

    def build_with_converter() -> PreTrainedModel:
        model = build()
        model._weight_conversions = [CONVERTERS[name]]  # undone by save_pretrained
        return model

    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model: [CONVERTERS[name]])
    return name, build, tmp_path, save_random(build_with_converter, tmp_path)


def test_every_way_to_put_tensors_together(converted):
    name, build, folder, state = converted

    sources = match(build_meta(build), folder)

    assert any(isinstance(source, Converted) for source in sources.values()) == (name in WHOLE)
    assert_equal(load(build, folder), state, {})
    for seed in range(5):
        shards = some_shards(state, seed)
        assert_equal(load(build, folder, shards), state, shards)


def test_what_is_converted_as_a_whole_is_said(converted, caplog):
    name, build, folder, _ = converted

    with caplog.at_level("INFO", logger=naming.__name__):
        match(build_meta(build), folder)

    assert ("converted as a whole on every rank" in caplog.text) == (name in WHOLE)


class Add(ConversionOps):
    """What no part of transformers does today: arithmetic on stored tensors."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        first, second = (input_dict[pattern][0] for pattern in source_patterns)
        return {target_patterns[0]: first + second}


def test_arithmetic_is_done_in_what_the_model_computes_in(tmp_path, monkeypatch):
    """As transformers does; sums in the stored format would be rounded."""
    build = causal("llama")
    name = "model.norm.weight"
    file = tmp_path / "model.safetensors"
    state = save_random(build, tmp_path)
    parts = {f"model.norm.{part}": torch.randn(64).to(torch.bfloat16) for part in ("a", "b")}
    change_tensors(file, **{name: None} | parts)
    converter = WeightConverter(["norm.a", "norm.b"], "norm.weight", [Add()])
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model: [converter])

    loaded = load(build, tmp_path)

    first, second = parts.values()
    assert_equal(loaded, state | {name: first.float() + second.float()}, {})


def test_files_are_unmapped_when_nothing_is_left_to_read(saved):
    folder, _ = saved("mixtral")
    files = list(folder.glob("model-*.safetensors"))
    mapped: list[int] = []

    def count(loaded: int, total: int) -> None:
        maps = Path("/proc/self/maps").read_text()
        mapped.append(sum(str(file) in maps for file in files))

    load(MODELS["mixtral"], folder, on_progress=count)

    assert len(files) > 5
    assert 0 < max(mapped) <= 5  # a thread may hold one or two
    assert mapped[-1] == 0
