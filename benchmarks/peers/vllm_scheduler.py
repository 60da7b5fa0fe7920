"""Times the scheduler of vLLM 0.32; run by an interpreter that has vLLM, imports nothing of ours.

Reads one case a line as JSON, as `benchmarks.scheduler.cases.to_json` writes it, and answers each
with a line: {"phases": {name: [us, ...]}, "gc_pauses": [us, ...], "full_gc_us": us}.
"""

import gc
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns

MAX_MODEL_LEN = 16_384
# vLLM wants a model's configuration; nothing is loaded.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
    "vocab_size": 32_000,
    "dtype": "bfloat16",
}


def build(model: str, case: dict, *, max_num_seqs: int, step_tokens: int, prefix_cache: bool):
    """A scheduler with one cache group of full attention, and the hasher its requests need."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.envs import enable_envs_cache
    from vllm.utils.gc_utils import freeze_gc_heap
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    block_size, num_blocks = case["block_size"], case["num_blocks"]
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_cache),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
        ),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        block_size=block_size,
        log_stats=True,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
    )
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    # Both as its engine does when it has started.
    freeze_gc_heap()
    enable_envs_cache()
    return scheduler, get_request_block_hasher(block_size, hash_fn) if prefix_cache else None


def make_prompt(case: dict, length: int) -> list[int]:
    return random.choices(range(case["vocab_size"]), k=length)


def make_params():
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)


def make_request(name: str, prompt: list[int], params, hasher):
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        pooling_params=None,
        sampling_params=params,
        block_hasher=hasher,
    )


def make_result(scheduler, output):
    """A token for each request that has caught up with its prompt."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[] if scheduler.requests[n].is_prefill_chunk else [7] for n in names],
    )


class Stopwatch:
    """Times between marks, in us."""

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = {}
        self._last = 0

    def start(self) -> None:
        self._last = perf_counter_ns()

    def mark(self, phase: str) -> None:
        now = perf_counter_ns()
        self.phases.setdefault(phase, []).append((now - self._last) / 1e3)
        self._last = perf_counter_ns()


def run_steps(scheduler, count: int, watch: Stopwatch) -> None:
    # A name that is bound again frees what it held: that belongs to the time of a step.
    for _ in range(count):
        watch.start()
        output = scheduler.schedule()
        watch.mark("schedule")
        result = make_result(scheduler, output)
        watch.start()
        _outcome = scheduler.update_from_output(output, result)
        watch.mark("update")


def run_decode(model: str, case: dict) -> dict:
    running, waiting = case["running"], case["waiting"]
    scheduler, hasher = build(
        model,
        case,
        max_num_seqs=running,
        step_tokens=case["step_tokens"],
        prefix_cache=case["prefix_cache"],
    )
    for index in range(running + waiting):
        prompt = make_prompt(case, case["context"] + index % case["block_size"])
        scheduler.add_request(make_request(str(index), prompt, make_params(), hasher))
    while len(scheduler.running) < running or any(
        request.num_output_tokens < 1 for request in scheduler.running
    ):
        run_steps(scheduler, 1, Stopwatch())
    run_steps(scheduler, case["num_warm_up_steps"], Stopwatch())
    watch, pauses, started = Stopwatch(), [], 0

    def see(phase: str, info: dict) -> None:
        nonlocal started
        if phase == "start":
            started = perf_counter_ns()
        else:
            pauses.append((perf_counter_ns() - started) / 1e3)

    gc.callbacks.append(see)
    run_steps(scheduler, case["num_steps"], watch)
    gc.callbacks.remove(see)
    assert scheduler.get_request_counts() == (running, waiting)
    started = perf_counter_ns()
    gc.collect()
    full_gc_us = (perf_counter_ns() - started) / 1e3
    return {"phases": watch.phases, "gc_pauses": pauses, "full_gc_us": full_gc_us}


def run_admit(model: str, case: dict) -> dict:
    from vllm.v1.request import RequestStatus

    count, length = case["num_prompts"], case["prompt_len"]
    scheduler, hasher = build(
        model,
        case,
        max_num_seqs=count,
        step_tokens=count * length,
        prefix_cache=case["hits"] != "off",
    )
    known = [make_prompt(case, length) for _ in range(count)]
    watch = Stopwatch()
    for index in range(case["num_warm_up_rounds"] + case["num_rounds"]):
        if index == case["num_warm_up_rounds"]:
            watch = Stopwatch()
        prompts = known
        if case["hits"] != "all":
            prompts = [make_prompt(case, length) for _ in range(count)]
        params = [make_params() for _ in prompts]
        watch.start()
        requests = [
            make_request(f"{index}-{place}", prompt, params[place], hasher)
            for place, prompt in enumerate(prompts)
        ]
        watch.mark("build")
        for request in requests:
            scheduler.add_request(request)
        watch.mark("add")
        output = scheduler.schedule()
        watch.mark("schedule")
        assert len(output.scheduled_new_reqs) == count
        result = make_result(scheduler, output)
        watch.start()
        _outcome = scheduler.update_from_output(output, result)
        watch.mark("update")
        names = [request.request_id for request in requests]
        watch.start()
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        watch.mark("finish")
    return {"phases": watch.phases, "gc_pauses": [], "full_gc_us": 0.0}


def main() -> None:
    # Libraries print what they like; the answers have the real stdout for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    random.seed(0)
    run = {"decode": run_decode, "admit": run_admit}
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        for line in sys.stdin:
            case = json.loads(line)
            print(json.dumps(run[case["kind"]](model, case)), file=answers, flush=True)
            # The scheduler is a cycle: it goes before the next one comes.
            gc.unfreeze()
            gc.collect()


if __name__ == "__main__":
    main()
