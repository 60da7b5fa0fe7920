"""What is simulated: a model on GPUs, the limits of its engines, how many of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.simulate.cost import CostConstants, CostModel
from benchmarks.simulate.hardware import Device
from benchmarks.simulate.model_shape import ModelShape
from benchmarks.simulate.router import RouterName
from runtime.config import EngineConfig, require
from runtime.driver import DEFAULT_BLOCK_SIZE, make_scheduler
from runtime.engine import Engine
from runtime.executor.base import Executor
from runtime.request import ModelInfo
from runtime.scheduling.cache_layout import CacheLayout, make_cache_layout
from runtime.structured import NoCompiler

# Of a GPU's memory; the rest is for activations, the context and fragmentation.
USABLE_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`num_replicas` engines of `config.tp` devices each.

    Of `config`, the limits count; model, launcher and device are these.
    Raises ConfigError: the model doesn't fit, or the limits contradict each other.
    """

    shape: ModelShape
    device: Device
    config: EngineConfig
    constants: CostConstants
    num_replicas: int = 1
    router: RouterName = "least_loaded"
    cost: CostModel = field(init=False)
    layout: CacheLayout = field(init=False)

    def __post_init__(self) -> None:
        require(self.num_replicas >= 1, f"replicas={self.num_replicas} must be at least 1")
        cost = CostModel(self.shape, self.device, tp=self.config.tp, constants=self.constants)
        object.__setattr__(self, "cost", cost)
        object.__setattr__(self, "layout", self._plan_cache())

    @property
    def model(self) -> ModelInfo:
        config, shape = self.config, self.shape
        reachable = min(shape.max_model_len, self.layout.max_sequence_tokens)
        return ModelInfo(
            name=shape.name,
            path="",
            architecture="",
            vocab_size=shape.vocab_size,
            max_model_len=min(config.max_model_len or reachable, reachable),
            eos_token_ids=(),
            tp_size=config.tp,
        )

    def make_engine(self, executor: Executor, clock: Callable[[], float]) -> Engine:
        """One replica's; its thread isn't started."""
        model = self.model
        scheduler = make_scheduler(self.config, self.layout, model)
        return Engine(
            model=model,
            scheduler=scheduler,
            executor=executor,
            compiler=NoCompiler("a simulation has no tokenizer"),
            clock=clock,
        )

    def _plan_cache(self) -> CacheLayout:
        config, shape, device = self.config, self.shape, self.device
        weight_bytes = shape.weight_bytes // config.tp
        usable_bytes = int(USABLE_SHARE * device.memory_bytes)
        left_bytes = usable_bytes - weight_bytes
        require(
            left_bytes > 0,
            f"tp={config.tp}: {weight_bytes} bytes of weights on each {device.name} leave no "
            f"room for a cache in {usable_bytes} bytes, {USABLE_SHARE:.0%} of its memory: raise "
            "--tp",
        )
        require(
            config.kv_memory is None or config.kv_memory <= left_bytes,
            f"kv_memory={config.kv_memory} bytes is more than the {left_bytes} bytes that the "
            f"weights leave of {USABLE_SHARE:.0%} of {device.name}'s memory",
        )
        return make_cache_layout(
            shape.cache_specs(config.tp),
            block_size=config.block_size or DEFAULT_BLOCK_SIZE,
            memory_bytes=config.kv_memory or left_bytes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=min(config.max_model_len or shape.max_model_len, shape.max_model_len),
            max_chunk_tokens=config.max_chunk_tokens,
        )


def describe(deployment: Deployment) -> str:
    shape, device, config = deployment.shape, deployment.device, deployment.config
    return (
        f"{shape.name}, {shape.num_params / 1e9:.2f} B parameters of {shape.element_bytes} bytes, "
        f"replicas of {config.tp} x {device.name}, router {deployment.router}"
    )
