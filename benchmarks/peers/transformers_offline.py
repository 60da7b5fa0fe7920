"""transformers' `generate` on padded batches, or its continuous batching.

transformers_offline.py '{"model": folder, "batching": "static" or "continuous", ...}'.
"""

import json
import sys

from runner import answer, take_stdout

# Rows of a padded batch; each runs to the longest output of its batch, and only what was asked for
# of it is counted.
NUM_ROWS = 32
PAGE_SIZE = 32
NUM_PAGES = 1024
WAIT_S = 60.0


def run_static(model):
    import torch

    def run(requests):
        counts = []
        for start in range(0, len(requests), NUM_ROWS):
            rows = requests[start : start + NUM_ROWS]
            width = max(len(each["prompt"]) for each in rows)
            longest = max(each["output_len"] for each in rows)
            missing = [width - len(each["prompt"]) for each in rows]
            ids = [[0] * gap + each["prompt"] for gap, each in zip(missing, rows, strict=True)]
            mask = [[0] * gap + [1] * (width - gap) for gap in missing]
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor(ids),
                    attention_mask=torch.tensor(mask),
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    do_sample=False,
                )
            num_new = output.shape[1] - width
            counts += [min(num_new, each["output_len"]) for each in rows]
        return counts

    return run


def run_continuous(model):
    from transformers import ContinuousBatchingConfig, GenerationConfig

    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=NUM_PAGES, max_requests_per_batch=64
        ),
    )
    manager.start()

    def run(requests):
        names = [
            manager.add_request(each["prompt"], max_new_tokens=each["output_len"], eos_token_id=-1)
            for each in requests
        ]
        counts = {}
        while len(counts) < len(names):
            output = manager.get_result(timeout=WAIT_S)
            if output is None:
                raise RuntimeError(f"no request ended within {WAIT_S:g} s")
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            if output.is_finished():
                counts[output.request_id] = len(output.generated_tokens)
        return [counts[name] for name in names]

    return run, lambda: manager.stop(block=True)


def main():
    answers = take_stdout()
    options = json.loads(sys.argv[1])

    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=getattr(torch, options["dtype"]), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    batching = options["batching"]
    engine = f"transformers {transformers.__version__}, {batching} batching"
    if batching == "static":
        answer(answers, engine, run_static(model))
        return
    run, stop = run_continuous(model)
    try:
        answer(answers, engine, run)
    finally:
        stop()


if __name__ == "__main__":
    main()
