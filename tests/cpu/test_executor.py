"""What ModelExecutor does with a batch, beside the tokens being right."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    FalconConfig,
    FalconH1Config,
    Glm4MoeConfig,
    MambaConfig,
)

from tests.tiny_models import (
    Feeder,
    Row,
    error_in_std,
    load_executor,
    make_batch,
    make_layout,
    save_random,
    save_tiny_model,
)
from workers.config import CacheLayout
from workers.errors import CacheError, ModelError, StepError
from workers.models.config import DTYPES

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def executor(folder):
    executor = load_executor(folder)
    executor.allocate_cache(make_layout(executor.spec))
    return executor


def test_the_batch_of_the_architecture_page(tmp_path):
    folder = save_tiny_model(tmp_path, "llama", vocab_size=4096)
    executor = load_executor(folder)
    executor.allocate_cache(CacheLayout(block_size=16, num_blocks=32, groups=((0, 1, 2),)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [101, 872, 2304, 1198]
    earlier = torch.randint(4096, (42,), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[12, 23, 5]]
    executor.execute_model(
        make_batch([Row(sequence_id=8, tokens=earlier, seq_len=0, block_tables=tables, sample=())])
    )

    batch = make_batch(
        [
            Row(sequence_id=7, tokens=prompt, seq_len=0, block_tables=[[7]]),
            Row(sequence_id=8, tokens=[345], seq_len=42, block_tables=tables),
        ]
    )
    tokens = executor.execute_model(batch)
    logits = executor.compute_logits(batch)

    assert batch.input_ids.tolist() == [101, 872, 2304, 1198, 345]
    assert batch.positions.tolist() == [0, 1, 2, 3, 42]
    assert batch.sample_index.tolist() == [3, 4]
    assert batch.sample_index.equal((batch.query_lens.cumsum(0) - 1).int())
    with torch.inference_mode():
        expected = [
            model(input_ids=torch.tensor([text])).logits[0, -1:]
            for text in (prompt, [*earlier, 345])
        ]
    assert error_in_std(logits.split(1), expected) < 1e-4
    assert tokens == {7: int(expected[0].argmax()), 8: int(expected[1].argmax())}


def test_a_step_that_samples_nothing_gives_nothing(executor):
    row = Row(sequence_id=1, tokens=[5, 6], seq_len=0, block_tables=[[3]], sample=())

    assert executor.execute_model(make_batch([row])) == {}
    assert executor.compute_logits(make_batch([row])) is None


def test_the_head_sees_the_sampled_rows_alone(executor):
    seen = []
    head = executor._model.module.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    rows = [
        Row(sequence_id=1, tokens=[5, 6, 7], seq_len=0, block_tables=[[3]]),
        Row(sequence_id=2, tokens=[8, 9], seq_len=0, block_tables=[[4]], sample=()),
    ]

    executor.execute_model(make_batch(rows))
    hook.remove()

    assert seen == [(1, 1, 64)]


def test_seeded_tokens_are_the_same_alone_and_in_a_batch(executor):
    def draw(count: int) -> list[int]:
        feeder = Feeder(executor)
        feed = {0: [5, 6, 7]} | {number: [number] * number for number in range(1, count)}
        output = []
        for _ in range(12):
            rows = [
                feeder.row(number, tokens, temperature=1.0, seed=number - 9, top_k=number % 3 * 4)
                for number, tokens in feed.items()
            ]
            tokens = executor.execute_model(make_batch(rows))
            feed = {number: [token] for number, token in tokens.items()}
            output.append(tokens[0])
        return output

    alone, batched = draw(1), draw(8)

    assert alone == batched
    assert len(set(alone)) > 3


def test_tokens_come_in_the_order_of_the_sampled_rows(executor):
    feeder = Feeder(executor)
    batch = make_batch([feeder.row(number, [5, number]) for number in (7, 8, 9)])
    order = torch.tensor([2, 0, 1])

    tokens = executor.execute_model(
        replace(
            batch,
            sample_index=batch.sample_index[order],
            sample_sequence=batch.sample_sequence[order],
        )
    )

    assert list(tokens) == [9, 7, 8]
    assert tokens == executor.execute_model(batch)


def test_timings_are_of_the_last_step(executor):
    row = Row(sequence_id=1, tokens=[5, 6], seq_len=0, block_tables=[[3]])

    executor.execute_model(make_batch([row]))

    assert executor.timings.forward_us > 0
    assert executor.timings.sample_us > 0


def test_the_spec_tells_what_the_driver_needs(executor):
    spec = executor.spec

    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (211, 256, ())
    assert len(spec.layers) == 3
    layer = spec.layers[0]
    assert (layer.num_kv_heads, layer.k_dim, layer.v_dim, layer.element_bytes) == (2, 16, 16, 4)
    assert spec.available_memory_bytes > 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input_ids": torch.tensor([5, 211])}, "input_ids"),
        ({"input_ids": torch.tensor([-1, 5])}, "input_ids"),
        ({"positions": torch.tensor([0, 256])}, "positions"),
        ({"sample_index": torch.tensor([2])}, "sample_index"),
        ({"block_tables": ()}, "block tables"),
        ({"block_copies": torch.tensor([[0, 192]])}, "block_copies"),
    ],
)
def test_a_batch_that_points_outside_is_refused(executor, change, field):
    batch = make_batch([Row(sequence_id=1, tokens=[5, 6], seq_len=0, block_tables=[[3]])])

    with pytest.raises(StepError, match=field):
        executor.execute_model(replace(batch, **change))


def test_a_block_outside_the_pool_is_refused(executor):
    row = Row(sequence_id=1, tokens=[5], seq_len=0, block_tables=[[1 << 20]])

    with pytest.raises(StepError, match="block_ids"):
        executor.execute_model(make_batch([row]))


def test_a_step_before_the_cache_is_refused(folder):
    row = Row(sequence_id=1, tokens=[5], seq_len=0, block_tables=[[0]])

    with pytest.raises(StepError, match="isn't allocated"):
        load_executor(folder).execute_model(make_batch([row]))


def test_a_cache_larger_than_memory_is_refused(folder):
    executor = load_executor(folder)
    layout = replace(make_layout(executor.spec), num_blocks=1 << 40)

    with pytest.raises(CacheError, match=r"bytes are free for this rank; lower kv_memory"):
        executor.allocate_cache(layout)


def test_other_calls_than_at_load_are_refused(executor):
    row = Row(sequence_id=1, tokens=[5], seq_len=0, block_tables=[[0]])
    layers = executor._model.module.model.layers
    first, second = layers[0], layers[1]
    layers[0], layers[1] = second, first

    with pytest.raises(ModelError, match="in another order"):
        executor.execute_model(make_batch([row]))
    layers[0], layers[1] = first, second
    executor._model.module.model.config.num_hidden_layers = 2
    with pytest.raises(ModelError, match="less often"):
        executor.execute_model(make_batch([row]))
    executor._model.module.model.config.num_hidden_layers = 3


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(**SMALL, state_size=4), "MambaForCausalLM never calls attention"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_head=2), "the attention mask by itself"),
        (
            FalconConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=2),
            "attention code of its own",
        ),
        (BertConfig(**SMALL), "neither causal nor a causal sliding window"),
        (
            BartConfig(
                vocab_size=64,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                decoder_ffn_dim=32,
                decoder_attention_heads=2,
                max_position_embeddings=64,
            ),
            "counts their positions by itself",
        ),
        (
            FalconH1Config(**SMALL, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64),
            "depend on others outside attention",
        ),
    ],
    ids=["recurrent", "alibi", "own-code", "both-ways", "counting", "attention-and-mamba"],
)
def test_models_that_paged_attention_would_get_wrong_are_refused(tmp_path, config, reason):
    save_random(tmp_path, config)

    with pytest.raises(ModelError, match=reason):
        load_executor(tmp_path)


@pytest.mark.usefixtures("torch_products")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_have_the_precision_that_transformers_gives_them(tmp_path, dtype):
    """What picks the experts stays in float32."""
    config = Glm4MoeConfig(
        **SMALL, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    save_random(tmp_path, config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[dtype]).state_dict()

    ours = load_executor(tmp_path, dtype=dtype)._model.module.state_dict()

    assert {name: tensor.dtype for name, tensor in ours.items()} == {
        name: tensor.dtype for name, tensor in theirs.items()
    }
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
