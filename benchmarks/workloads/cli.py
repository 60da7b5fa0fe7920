"""`python -m benchmarks workload`: writes a workload file."""

from pathlib import Path

import click

from benchmarks.workloads.shapes import KINDS, SEED, make_uniform, make_workload
from benchmarks.workloads.workload import save_workload


@click.command("workload")
@click.option(
    "--kind",
    type=click.Choice([*KINDS, "uniform"]),
    required=True,
    help="A: 32 prompts of 128 tokens, 64 of output; B: mixed lengths; C: one request; D: a shared "
    "beginning; uniform: as the options below say.",
)
@click.option("--vocab", "vocab_size", type=click.IntRange(1), required=True, help="Its size.")
@click.option("--model", required=True, help="The name that the file gives the model.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--seed", type=int, default=SEED, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True)
@click.option("--prompt", "prompt_len", type=click.IntRange(1), default=128, show_default=True)
@click.option("--output", "output_len", type=click.IntRange(1), default=64, show_default=True)
@click.option("--shared", "shared_len", type=click.IntRange(0), default=0, show_default=True)
def workload(
    kind: str,
    vocab_size: int,
    model: str,
    out: Path,
    seed: int,
    requests: int,
    prompt_len: int,
    output_len: int,
    shared_len: int,
) -> None:
    """Write a file of prompts, as token ids, and output lengths."""
    if shared_len >= prompt_len:
        raise click.UsageError(f"--shared {shared_len} must be less than --prompt {prompt_len}")
    if kind == "uniform":
        made = make_uniform(
            model=model,
            vocab_size=vocab_size,
            num_requests=requests,
            prompt_len=prompt_len,
            output_len=output_len,
            shared_len=shared_len,
            seed=seed,
        )
    else:
        made = make_workload(kind, model=model, vocab_size=vocab_size, seed=seed)
    save_workload(made, out)
    click.echo(
        f"{out}: {len(made.requests)} requests, {made.num_prompt_tokens} tokens of prompts, "
        f"{made.num_output_tokens} of output, digest {made.digest()[:12]}"
    )
