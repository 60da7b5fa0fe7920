"""What can be set for an engine, validated once; `frontend_config` has the rest.

Command-line flags and TOML keys are made from these fields.
"""

from dataclasses import dataclass
from typing import Literal

from runtime.addresses import read_addresses
from runtime.errors import ConfigError
from runtime.options import option

MIN_LEASE_S = 1.0  # a heartbeat is a tenth of it
MAX_TIMEOUT_S = 7 * 24 * 3600  # longer waits overflow what the operating system takes
# Workers keep the samples of 8 steps.
MAX_PIPELINE_DEPTH = 8
MAX_THREADS = 1024
MAX_NUM_SEQS = 1 << 16  # rows are 16-bit numbers on their way to the workers
MIN_RECORD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a model, its ranks, its cache, its scheduler."""

    model: str = option(
        "demo", "Model folder, Hugging Face hub id, or `demo` for the embedded Gemma 3 270M."
    )
    served_model_name: str | None = option(
        None, "Name that clients see; the value of --model where unset."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Number format to compute in, of weights and cache too; auto is the checkpoint's."
    )
    quantization: Literal["none", "fp8"] = option(
        "none",
        "Linear layers' weights in 8 bits, made of the checkpoint's while it is loaded, each "
        "output with a scale; embedding and head stay. Models with experts are refused.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto", "Number format of the KV cache: auto is dtype's, fp8 (e4m3) has 8 bits."
    )
    max_model_len: int | None = option(
        None, "Most tokens of prompt and output together; what model and cache allow where unset."
    )

    generation_config: Literal["auto", "ignore"] = option(
        "auto",
        "Defaults of sampling parameters: those of the model's generation_config.json, or "
        "Lockstep's own alone.",
    )

    tp: int = option(1, "Tensor-parallel ranks.")
    device: Literal["cpu", "cuda"] = option("cpu", "Where the ranks compute.")
    launcher: Literal["ray", "local", "static"] = option(
        "ray",
        "Ray actors, plain processes on this machine, or workers that something else starts, at "
        "--workers.",
    )
    workers: str | None = option(
        None,
        "Addresses of static workers, HOST:PORT[,HOST:PORT], in the order of ranks; at each "
        "`lockstep worker` is started again whenever it ends. LOCKSTEP_WORKER_TOKEN has their "
        "token.",
    )
    ray_address: str | None = option(
        None, "Ray cluster to join; a Ray of its own on this machine where unset."
    )
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = option(
        "pack",
        "How Ray places the ranks: on as few nodes as it can, or as many; the strict ones wait "
        "until it is one node, or one for each rank.",
    )
    interface: str | None = option(
        None,
        "Network interface by which ranks exchange tensors, of this name on every node. Where "
        "unset, the one that GLOO_SOCKET_IFNAME (on cuda NCCL_SOCKET_IFNAME) names on a node, or "
        "the one that has the node's address.",
    )
    threads_per_rank: int = option(
        0, "CPU threads of a rank; 0 shares the machine's cores among its ranks."
    )
    attention: Literal["auto", "flash_attn", "torch_varlen", "triton", "native", "reference"] = (
        option("auto", "Attention backend; auto takes the first that suits model and device.")
    )
    deterministic: bool = option(
        False,
        "A request's logits have the same bits alone, in any batch and in any chunks, in bfloat16 "
        "too. Slower; models with experts are refused.",
    )

    kv_memory: int | None = option(
        None,
        "Bytes of KV cache per rank, such as 2GiB. Where unset 30 % of what is free, and on cuda "
        "what gpu_memory_fraction leaves.",
        unit="bytes",
    )
    gpu_memory_fraction: float | None = option(
        None,
        "Share of each GPU's memory that weights, steps, CUDA graphs and KV cache may take, with "
        "whatever else is on it; 0.9 where unset. With device=cuda.",
    )
    enforce_eager: bool = option(
        False, "Launch decode steps kernel by kernel, without CUDA graphs. With device=cuda."
    )
    block_size: int | None = option(
        None, "Tokens per cache block; 16 where unset, or the least that the backend takes."
    )

    max_num_batched_tokens: int = option(512, "Token budget of a step.")
    max_num_seqs: int = option(64, "Most sequences that run at once.")
    max_num_partial_prefills: int = option(
        1, "Most sequences at once whose prompts are computed only in part."
    )
    long_prefill_token_threshold: int | None = option(
        None, "Most tokens of one prompt in a step; the whole token budget where unset."
    )
    max_num_scored_tokens: int = option(
        128, "Most tokens in a step of a prompt whose logprobs are wanted."
    )
    watermark: float = option(
        0.01, "Share of the blocks that admission leaves free for running sequences to grow into."
    )
    prefix_cache: bool = option(True, "Keep the blocks of prompts for requests that begin alike.")

    policy: Literal["fcfs", "priority", "fair"] = option(
        "fcfs", "Who is next: first come, most urgent, or tenants in turn by their tokens."
    )
    priority_ageing_s: float = option(
        30.0, "A waiting request gains one class of priority in so many seconds."
    )
    max_queued_requests: int | None = option(
        None, "Most requests that wait; more are refused. No limit where unset."
    )
    max_queued_tokens: int | None = option(
        None, "Most prompt tokens that wait; more are refused. No limit where unset."
    )
    queue_timeout_s: float | None = option(
        None, "A request that waits longer is refused. No limit where unset."
    )

    pipeline_depth: int = option(
        2, "Most steps that the workers have at once: while one runs, the next is there already."
    )
    step_timeout_s: float = option(
        300.0,
        "A step that takes longer means that a rank hangs. Once steps of its size have been seen, "
        "ten times as long as they take is enough, and 10 s at least.",
    )
    lease_s: float = option(
        10.0,
        "Workers end themselves when their driver is silent for so long, and count as lost when "
        "they are.",
    )
    max_restarts: int = option(
        6,
        "When so many restarts of the workers in a row bring no token, all requests fail; it is "
        "tried again nevertheless. With 0 the engine ends with its workers.",
    )
    startup_timeout_s: float = option(900.0, "Longest wait for workers to start and load.")
    standby: bool = option(
        False,
        "Keep a spare process for each rank, with nothing loaded, that takes over when workers are "
        "lost: 0.4 GB of host memory each. With launcher=local.",
    )
    check_ranks: bool = option(False, "Debug: compare in each step what the ranks ran.")
    check_deltas: bool = option(
        False, "Debug: send each step whole too; ranks compare it with what its delta gives."
    )

    record: str | None = option(
        None,
        "Folder to write down what the engine does in, prompts included: for `lockstep replay` and "
        "`lockstep trace`.",
    )
    record_steps: bool = option(
        False, "Record whole steps too, with which `lockstep replay --model` runs them again."
    )
    record_redact: bool = option(False, "Leave token ids and texts out: timelines alone.")
    record_max_bytes: int = option(
        1 << 30, "Most bytes of all recordings in the folder; the oldest go.", unit="bytes"
    )

    cluster_certs: str | None = option(
        None,
        "Folder with the certificates that `lockstep certs` makes, the same on every node: driver, "
        "workers, engines and frontends then talk by mutual TLS.",
    )

    def __post_init__(self) -> None:
        require(
            self.block_size is None or self.block_size >= 1,
            f"block_size={self.block_size} must be at least 1",
        )
        for name in (
            "tp",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_num_scored_tokens",
        ):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value} must be at least 1")
        require(
            1 <= self.pipeline_depth <= MAX_PIPELINE_DEPTH,
            f"pipeline_depth={self.pipeline_depth} must be in [1, {MAX_PIPELINE_DEPTH}]",
        )
        require(
            self.max_num_seqs <= MAX_NUM_SEQS,
            f"max_num_seqs={self.max_num_seqs} must be at most {MAX_NUM_SEQS}",
        )
        for name in ("step_timeout_s", "startup_timeout_s"):
            value = getattr(self, name)
            require(0 < value <= MAX_TIMEOUT_S, f"{name}={value} must be in (0, {MAX_TIMEOUT_S}]")
        require(
            MIN_LEASE_S <= self.lease_s <= MAX_TIMEOUT_S,
            f"lease_s={self.lease_s} must be in [{MIN_LEASE_S}, {MAX_TIMEOUT_S}]",
        )
        require(self.max_restarts >= 0, f"max_restarts={self.max_restarts} must be at least 0")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
            f"max_num_seqs={self.max_num_seqs}: a full decode step needs one token each",
        )
        require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len={self.max_model_len} must be at least 2: "
            "a prompt token and an output token",
        )
        require(
            self.kv_memory is None or self.kv_memory >= 1,
            f"kv_memory={self.kv_memory} must be at least 1 byte",
        )
        require(
            0 <= self.threads_per_rank <= MAX_THREADS,
            f"threads_per_rank={self.threads_per_rank} must be in [0, {MAX_THREADS}]",
        )
        require(0 <= self.watermark < 1, f"watermark={self.watermark} must be in [0, 1)")
        check_not_empty(self, "cluster_certs", "interface", "record")
        self._check_device()
        self._check_launcher()
        self._check_prefills()
        self._check_recording()
        self._check_queue()

    @property
    def max_chunk_tokens(self) -> int:
        """Most tokens that one sequence is fed in a step."""
        budget = self.max_num_batched_tokens
        return min(budget, self.long_prefill_token_threshold or budget)

    @property
    def worker_list(self) -> list[str]:
        """The addresses of static workers, by rank; none with other launchers."""
        return [] if self.workers is None else read_addresses("workers", self.workers)

    def _check_device(self) -> None:
        fraction = self.gpu_memory_fraction
        require(
            fraction is None or 0 < fraction <= 1,
            f"gpu_memory_fraction={fraction} must be in (0, 1]",
        )
        for name in ("gpu_memory_fraction", "enforce_eager"):
            value = getattr(self, name)
            require(
                not value or self.device == "cuda",
                f"{name}={value} needs device=cuda, not device={self.device}",
            )

    def _check_launcher(self) -> None:
        for name, launcher in (("ray_address", "ray"), ("workers", "static")):
            value = getattr(self, name)
            require(
                value is None or self.launcher == launcher,
                f"{name}={value} needs launcher={launcher}, not launcher={self.launcher}",
            )
        require(
            self.placement == "pack" or self.launcher == "ray",
            f"placement={self.placement} needs launcher=ray, not launcher={self.launcher}",
        )
        require(
            not self.standby or self.launcher == "local",
            f"standby is set, but launcher={self.launcher} has no spare workers: it needs "
            "launcher=local",
        )
        if self.launcher == "static":
            require(self.workers is not None, "launcher=static needs workers, HOST:PORT by rank")
            count = len(self.worker_list)
            require(
                count == self.tp,
                f"workers={self.workers} must be as many as ranks: they are {count}, tp={self.tp}",
            )

    def _check_prefills(self) -> None:
        most = self.max_num_partial_prefills
        require(
            1 <= most <= self.max_num_seqs,
            f"max_num_partial_prefills={most} must be at least 1 and at most "
            f"max_num_seqs={self.max_num_seqs}",
        )
        threshold = self.long_prefill_token_threshold
        require(
            threshold is None or threshold >= 1,
            f"long_prefill_token_threshold={threshold} must be at least 1",
        )

    def _check_recording(self) -> None:
        for name in ("record_steps", "record_redact"):
            require(
                self.record is not None or not getattr(self, name),
                f"{name} is set without record, the folder to write to",
            )
        require(
            not (self.record_steps and self.record_redact),
            "record_steps and record_redact are set: steps are made of token ids",
        )
        least = MIN_RECORD_BYTES
        require(
            self.record_max_bytes >= least,
            f"record_max_bytes={self.record_max_bytes} must be at least {least}",
        )

    def _check_queue(self) -> None:
        require(
            0 < self.priority_ageing_s <= MAX_TIMEOUT_S,
            f"priority_ageing_s={self.priority_ageing_s} must be in (0, {MAX_TIMEOUT_S}]",
        )
        for name in ("max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} must be at least 1")
        timeout_s = self.queue_timeout_s
        require(
            timeout_s is None or 0 < timeout_s <= MAX_TIMEOUT_S,
            f"queue_timeout_s={timeout_s} must be in (0, {MAX_TIMEOUT_S}]",
        )


def require_key(name: str, key: str) -> None:
    """Raises ConfigError, without the key, where it can't be sent."""
    require(
        key.isascii() and key.isprintable() and key == key.strip() != "",
        f"{name} of {len(key)} characters must be printable ASCII, without space at its ends, and "
        "not empty: it travels in a header",
    )


def check_not_empty(config: object, *names: str) -> None:
    """Raises ConfigError: a text that may be unset is empty."""
    for name in names:
        require(getattr(config, name) != "", f"{name} is empty: leave it unset, or give a value")


def require_port(name: str, port: int) -> None:
    require(0 <= port <= 65535, f"{name}={port} must be in [0, 65535]")


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigError(otherwise)
