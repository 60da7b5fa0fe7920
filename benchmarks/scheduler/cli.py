"""`python -m benchmarks scheduler`: the cases that are run, in which order, and what comes out."""

from contextlib import ExitStack
from pathlib import Path

import click

from benchmarks.report import json_option, machine_line, smoke_option, write_json
from benchmarks.scheduler.cases import AdmitCase, Case, DecodeCase, Hits, cache_pair
from benchmarks.scheduler.ours import (
    HASHED_TOKENS,
    measure_admit,
    measure_decode,
    measure_hashing,
)
from benchmarks.scheduler.peer import VllmPeer
from benchmarks.scheduler.results import Results

BLOCK_SIZE = 16
VLLM_BLOCK_SIZE = 32
NOTES = """\
A step is schedule, flatten and update, freeing what the step before left included; its result is
made between the timed parts. The collector is on; as in the engine, the heap is frozen
(gc.collect, gc.freeze) once the scheduler is there, before any request is. Figures are over the
steps of all repeats. disturbed: steps in which the system gave the core to something else; quiet:
of the other ones. pauses: collections of any generation within the timed steps, how many, us in all
and the longest; full gc: us of a collection of everything, asked for after the timed steps.
ratio: ours over vLLM's, median of the repeats, in each of which ours and theirs ran in turn. Ours
has flattening in it, theirs hasn't: vLLM's model runner does that. Of the admissions the ratio is
of build + add + schedule, since vLLM hashes the prompt when it builds the request."""


@click.command("scheduler")
@click.option(
    "--running", type=click.IntRange(1), multiple=True, default=(64, 256, 1024), show_default=True
)
@click.option(
    "--waiting", type=click.IntRange(0), multiple=True, default=(0, 1000, 10_000), show_default=True
)
@click.option("--context", default=400, show_default=True, help="Tokens of the shortest prompt.")
@click.option("--steps", default=256, show_default=True, help="Timed steps of a cell.")
@click.option("--repeats", default=5, show_default=True)
@click.option(
    "--block-size",
    type=click.IntRange(1),
    help=f"Tokens per cache block; {BLOCK_SIZE} where unset, with --vllm {VLLM_BLOCK_SIZE}.",
)
@click.option(
    "--vllm",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Python that has vLLM 0.32: runs its scheduler in turns with ours.",
)
@json_option
@smoke_option
def scheduler(
    running: tuple[int, ...],
    waiting: tuple[int, ...],
    context: int,
    steps: int,
    repeats: int,
    block_size: int | None,
    vllm: Path | None,
    json_path: Path | None,
    smoke: bool,
) -> None:
    """Time schedule + flatten + update, without a model.

    Cells: sequences that run, one token each a step, by requests that wait; with and without the
    prefix cache; for a model of full attention, and for the cache groups of Gemma 3 ("hybrid", at
    contexts past its window). Prompts are random, so the prefix cache finds nothing, and differ in
    length, so that rows cross the edges of blocks at different steps.

    \b
    Metrics (NAME: 256_running_10000_waiting, with _hybrid, with _no_prefix_cache):
      step_us_NAME               median; also _p99, _max; _disturbed: steps in which the system gave
                                 the core to something else; _p99_undisturbed, _max_undisturbed: of
                                 the others; _gc_pauses, _gc_total, _gc_longest
      full_gc_us_NAME            a collection of everything, after the timed steps
      prefix_cache_ratio_256_running   a step with the prefix cache over one without; also _hybrid
      admit_32x512_us            add + schedule of 32 prompts of 512 tokens, none known; also
                                 _no_prefix_cache, _evicting (the pool is full of cached blocks),
                                 _hits (all known), and each of these with _disturbed, and with
                                 _undisturbed (the median of the other rounds)
      admit_build_32x512_us      making the sequences; admit_rest_: flatten + update
      hash_ns_per_token
      ratio_vllm_NAME, ratio_vllm_admit_32x512_us   ours over vLLM's
      vllm_step_us_NAME, vllm_full_gc_us_NAME, vllm_admit_32x512_us, vllm_admit_build_32x512_us
      block_size, repeats
    """  # noqa: D301 - click wants the backspace itself
    size = block_size or (VLLM_BLOCK_SIZE if vllm else BLOCK_SIZE)
    if smoke:
        running, waiting, context, steps, repeats = (4,), (0, 3), 40, 8, 1
    click.echo(f"{machine_line()}; block size {size}, {repeats} repeats of {steps} steps")
    click.echo(NOTES)
    decode = decode_cases(running, waiting, block_size=size, context=context, num_steps=steps)
    admit = admit_cases(size, smoke=smoke)
    results = Results()
    with ExitStack() as stack:
        peer = stack.enter_context(VllmPeer(vllm)) if vllm else None
        for _ in range(repeats):
            run_once(decode, admit, results, peer)
            run_pairs(decode, results)
            num_tokens = 256 if smoke else HASHED_TOKENS
            results.hash_ns += measure_hashing(size, num_tokens=num_tokens, num_rounds=20)
    results.print_tables()
    click.echo(f"\n{machine_line()}")
    if json_path is not None:
        metrics = results.metrics() | {"block_size": size, "repeats": repeats}
        write_json(json_path, metrics)


def decode_cases(
    running: tuple[int, ...],
    waiting: tuple[int, ...],
    *,
    block_size: int,
    context: int,
    num_steps: int,
) -> list[DecodeCase]:
    """All cells; those of the hybrid layout only with an empty queue, at longer contexts."""
    cells = [(number, queued, False) for number in running for queued in waiting]
    cells += [(number, 0, True) for number in running]
    return [
        DecodeCase(
            running=number,
            waiting=queued,
            prefix_cache=prefix_cache,
            block_size=block_size,
            context=context + 512 * hybrid,
            hybrid=hybrid,
            num_steps=num_steps,
        )
        for number, queued, hybrid in cells
        for prefix_cache in (True, False)
    ]


def admit_cases(block_size: int, *, smoke: bool) -> list[AdmitCase]:
    kinds: tuple[Hits, ...] = ("off", "none", "evicting", "all")
    if smoke:
        return [
            AdmitCase(hits=hits, block_size=block_size, num_prompts=2, prompt_len=128, num_rounds=2)
            for hits in kinds
        ]
    return [AdmitCase(hits=hits, block_size=block_size) for hits in kinds]


def run_once(
    decode: list[DecodeCase], admit: list[AdmitCase], results: Results, peer: VllmPeer | None
) -> None:
    """One repeat: every case with ours, and with the peer right after."""
    cases: list[Case] = [*decode, *admit]
    for case in cases:
        if isinstance(case, DecodeCase):
            results.ours[case] += measure_decode([case])
        else:
            results.ours[case].append(measure_admit(case))
        if peer is not None and not (isinstance(case, DecodeCase) and case.hybrid):
            results.vllm[case].append(peer.measure(case))


def run_pairs(decode: list[DecodeCase], results: Results) -> None:
    """One repeat, in both orders, of each number running and layout, at the first queue length."""
    cached: dict[tuple[int, bool], DecodeCase] = {}
    for case in decode:
        if case.prefix_cache:
            cached.setdefault((case.running, case.hybrid), case)
    for case in cached.values():
        with_cache, without = cache_pair(case)
        first = measure_decode([with_cache, without])
        second = measure_decode([without, with_cache])
        results.pairs[case].append([(first[0], first[1]), (second[1], second[0])])
