"""`lockstep generate`: one prompt, without a server."""

from typing import Any

import click

from runtime.commands.common import config_option, options_of, pick, set_up_logging, verbose_option
from runtime.config import EngineConfig
from runtime.sampling_params import SamplingParams

# The terminal shows one choice, and its text alone; `runtime.LLM` gives the rest.
UNSHOWN = ("n", "logprobs", "prompt_logprobs")


@click.command()
@config_option
@click.argument("prompt")
@options_of(EngineConfig)
@options_of(SamplingParams, leave_out=UNSHOWN)
@verbose_option
def generate(prompt: str, verbose: bool, **values: Any) -> None:
    """Start an engine, stream the continuation of PROMPT to the terminal, stop."""
    from runtime.llm import LLM

    set_up_logging(verbose=verbose)
    params = pick(SamplingParams, values)
    with LLM.from_config(pick(EngineConfig, values)) as llm:
        for chunk in llm.stream(prompt, params):
            print(chunk.text, end="", flush=True)
        print()
