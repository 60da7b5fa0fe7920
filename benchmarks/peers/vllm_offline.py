"""vLLM's LLM class; run by an interpreter that has it: vllm_offline.py '{"model": folder, ...}'."""

import json
import sys

from runner import answer, take_stdout


def main():
    answers = take_stdout()
    options = json.loads(sys.argv[1])

    import vllm

    llm = vllm.LLM(
        model=options["model"],
        dtype=options["dtype"],
        skip_tokenizer_init=True,
        max_model_len=options["max_model_len"],
        max_num_seqs=64,
        enable_prefix_caching=options["prefix_caching"],
        tensor_parallel_size=options["tp"],
        seed=0,
    )

    def run(requests):
        prompts = [{"prompt_token_ids": each["prompt"]} for each in requests]
        params = [
            vllm.SamplingParams(
                temperature=0, max_tokens=each["output_len"], ignore_eos=True, detokenize=False
            )
            for each in requests
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(each.outputs[0].token_ids) for each in outputs]

    answer(answers, f"vLLM {vllm.__version__}", run, before=llm.reset_prefix_cache)


if __name__ == "__main__":  # its engine and ranks import this file again
    main()
