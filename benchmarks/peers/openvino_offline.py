"""OpenVINO GenAI's continuous batching; run by an interpreter that has it.

openvino_offline.py '{"model": folder of optimum's export, ...}'.
"""

import json
import sys

from runner import answer, take_stdout


def main():
    answers = take_stdout()
    options = json.loads(sys.argv[1])

    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = options["cache_gib"]
    scheduling.max_num_seqs = 64
    scheduling.enable_prefix_caching = options["prefix_caching"]
    properties = {
        "INFERENCE_PRECISION_HINT": options["precision"],
        "KV_CACHE_PRECISION": options["precision"],
        "INFERENCE_NUM_THREADS": options["threads"],
    }
    pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduling, "CPU", properties)

    def run(requests):
        handles = []
        for number, each in enumerate(requests):
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = each["output_len"]
            config.ignore_eos, config.do_sample = True, False
            ids = openvino.Tensor(np.array([each["prompt"]], dtype=np.int64))
            handles.append(pipeline.add_request(number, ids, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [len(each.read_all()[0].generated_ids) for each in handles]

    answer(answers, f"OpenVINO GenAI {genai.__version__.partition('-')[0]}", run)


if __name__ == "__main__":
    main()
