"""What a rank is told at Initialize, and what it tells of the model it loaded."""

from dataclasses import dataclass

from workers.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One rank's part of an epoch."""

    model_path: str
    random_weights: bool = False  # the folder's configuration alone counts; for measuring
    rank: int = 0
    tp_size: int = 1
    rendezvous_host: str = ""
    rendezvous_port: int = 0
    interface: str = ""  # where tensors are exchanged; "": from where the rendezvous is reached
    address: str = ""  # of that interface
    dtype: str = "auto"  # auto (the checkpoint's), float32, bfloat16, float16
    quantization: str = "none"  # of linear layers' weights: none, fp8
    kv_cache_dtype: str = "auto"  # auto (as dtype), fp8
    device: str = "cpu"  # cpu, cuda
    attention: str = "auto"
    deterministic: bool = False  # a row gets the same bits in any batch
    num_threads: int = 0  # 0: this host's cores shared among its ranks
    local_world_size: int = 1  # ranks on this host
    max_num_batched_tokens: int = 512  # of a step
    max_num_seqs: int = 64  # in a step
    max_num_scored_tokens: int = 128  # of a step, whose logprobs are wanted
    # On cuda alone:
    gpu_memory_fraction: float = 0.9  # of the device, for everything
    enforce_eager: bool = False  # no CUDA graphs
    collective_timeout_s: float = 300.0  # of one in a step; the process ends then


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheSpec:
    """What one attention call of the forward pass keeps in the cache, on this rank.

    Raises ModelError: it has both a window and a chunk.
    """

    window: int  # tokens a query sees, itself included; 0: all before it
    chunk: int = 0  # a query sees from the last multiple of so many tokens on; 0: all before it
    num_kv_heads: int
    k_dim: int
    v_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        if self.window and self.chunk:
            raise ModelError(
                f"a layer has window={self.window} and chunk={self.chunk}: one of them must be 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The loaded model, as the driver needs to know it."""

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerCacheSpec, ...]  # in the order of the attention calls of a forward pass
    available_memory_bytes: int
    block_size_multiple: int
    parameter_bytes: int
    attention: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """How the driver wants the KV cache: `num_blocks` blocks that all groups share.

    A block has room for `block_size` tokens of all layers of the group that takes most.
    """

    block_size: int
    num_blocks: int
    groups: tuple[tuple[int, ...], ...]  # indices into ModelSpec.layers
