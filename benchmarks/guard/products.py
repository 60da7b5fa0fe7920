"""The matrix products of a Llama and nothing else, as a subject to be compared with.

`python -m benchmarks.guard.products '{"config": PATH, "dtype": "float32", "max_rows": 512}'`: for
each workload what a plain loop of torch's linear layers takes, prompts in chunks of at most
`max_rows`, then a step for each further token. Nothing in it changes when the engine does.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.runner import Requests, answer, take_stdout


class Products:
    """Random weights of the sizes that a configuration says."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
        queries = head_dim * config["num_attention_heads"]
        keys = head_dim * config["num_key_value_heads"]
        # Inputs and outputs: q, k, v, o, gate, up, down.
        shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]

        def drawn(inputs: int, outputs: int) -> torch.Tensor:
            return torch.randn(outputs, inputs).to(dtype)  # [outputs, inputs]

        self._layers = [
            [drawn(*shape) for shape in shapes] for _ in range(config["num_hidden_layers"])
        ]
        self._head = drawn(hidden, config["vocab_size"])
        self._dtype = dtype

    def step(self, num_rows: int, num_sampled: int) -> None:
        """`num_rows` tokens through all layers, `num_sampled` of them through the head."""
        inputs = {
            size: torch.ones(num_rows, size, dtype=self._dtype)
            for size in {weight.shape[1] for weight in self._layers[0]}
        }
        for layer in self._layers:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        if num_sampled:
            sampled = torch.ones(num_sampled, self._head.shape[1], dtype=self._dtype)
            torch.nn.functional.linear(sampled, self._head)


def run(products: Products, requests: Requests, max_rows: int) -> list[int]:
    """How many tokens each request would have: all that it asked for."""
    left = sum(len(each["prompt"]) for each in requests)
    while left > max_rows:
        products.step(max_rows, 0)
        left -= max_rows
    products.step(left, len(requests))
    lengths = [each["output_len"] for each in requests]
    for number in range(1, max(lengths)):
        running = sum(length > number for length in lengths)
        products.step(running, running)
    return lengths


def main() -> None:
    answers = take_stdout()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    config = json.loads(Path(options["config"]).read_text("utf-8"))
    products = Products(config, getattr(torch, options["dtype"]))
    with torch.inference_mode():
        answer(
            answers,
            f"torch {torch.__version__}, products alone",
            lambda requests: run(products, requests, options["max_rows"]),
        )


if __name__ == "__main__":
    main()
