"""`python -m benchmarks serve`: an open loop of requests against a server."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from tqdm import tqdm

from benchmarks.clients import FailedRequest
from benchmarks.compare.options import file, workload_option
from benchmarks.compare.over_network import ServerEnded
from benchmarks.compare.smoke import smoke_workload
from benchmarks.make_model import save_tiny_llama
from benchmarks.report import json_option, machine_line, markdown_row, smoke_option, write_json
from benchmarks.serve.arrivals import Load, of_trace, poisson
from benchmarks.serve.load import offer
from benchmarks.serve.plot import plot
from benchmarks.serve.summary import HEADERS, Goals, Summary, sum_up
from benchmarks.serve.target import Server, own_server, reached
from benchmarks.simulate.plot import require_matplotlib
from benchmarks.workloads.workload import load_workload
from runtime.frontend_processes import API_KEY_VARIABLE

NOTES = """\
Requests come when they are due, whatever becomes of those before. ITL: between messages of a
stream. goodput: requests/s that met the goals. sent late: how long after it was due a request left
this client; where that is much, the client was too slow for the load."""


@click.command("serve")
@click.option("--backend", type=click.Choice(["grpc", "openai"]), default="grpc", show_default=True)
@click.option("--url", help="HOST:PORT of gRPC, or http://HOST:PORT of OpenAI's API.")
@click.option("--model-name", default="demo", show_default=True, help="For OpenAI's API.")
@click.option("--api-key", envvar=API_KEY_VARIABLE, show_envvar=True)
@click.option("--serve", "command", help="A command that starts the server, ended afterwards.")
@workload_option
@click.option("--rate", "rates", type=click.FloatRange(0, min_open=True), multiple=True)
@click.option("--requests", "num_requests", type=click.IntRange(1), default=100, show_default=True)
@click.option("--trace", type=file, help="Lines of arrivals, as `simulate` takes them.")
@click.option("--vocab", "vocab_size", type=click.IntRange(1), help="Its size, for --trace.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--ttft-goal-ms", type=click.FloatRange(0))
@click.option("--tpot-goal-ms", type=click.FloatRange(0))
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False))
@json_option
@smoke_option
def serve(
    backend: str,
    url: str | None,
    model_name: str,
    api_key: str | None,
    command: str | None,
    paths: tuple[Path, ...],
    rates: tuple[float, ...],
    num_requests: int,
    trace: Path | None,
    vocab_size: int | None,
    seed: int,
    ttft_goal_ms: float | None,
    tpot_goal_ms: float | None,
    markdown_path: Path | None,
    plot_path: Path | None,
    json_path: Path | None,
    smoke: bool,
) -> None:
    """Send requests at random times, or a trace's, and time their streams.

    \b
    Metrics (RATE: requests/s offered; FIGURE: ttft, tpot, itl, e2e):
      FIGURE_ms_p50_RATE, _p90, _p99
      finished_per_s_, goodput_per_s_, output_tokens_per_s_, failed_, late_ms_p99_RATE
    """  # noqa: D301 - click wants the backspace itself
    if plot_path is not None:
        require_matplotlib()
    goals = Goals(ttft_s=_seconds(ttft_goal_ms), tpot_s=_seconds(tpot_goal_ms))
    with ExitStack() as stack:
        if smoke:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            save_tiny_llama(folder)
            server = stack.enter_context(own_server(folder, backend))
            loads = [
                poisson(smoke_workload(), requests_per_s=r, num_requests=6, seed=seed)
                for r in (4, 8)
            ]
        elif url is None:
            raise click.UsageError("give --url, or --smoke")
        else:
            server = Server(
                backend=backend, url=url, model=model_name, api_key=api_key, command=command
            )
            loads = _loads(paths, rates, num_requests, trace, vocab_size, seed)
        click.echo(f"{machine_line()}; {backend}\n{NOTES}\n")
        try:
            summaries = asyncio.run(_sweep(server, loads, goals))
        except (FailedRequest, ServerEnded) as error:
            raise click.ClickException(f"{server.url}: {error}") from error
    _report(f"{backend}; {machine_line()}", summaries, markdown_path, plot_path, json_path)


def _report(
    title: str,
    summaries: Sequence[Summary],
    markdown_path: Path | None,
    plot_path: Path | None,
    json_path: Path | None,
) -> None:
    table = "\n".join(
        [markdown_row(HEADERS), markdown_row(["---"] * len(HEADERS))]
        + [each.row() for each in summaries]
    )
    click.echo(f"\n{table}")
    for each in summaries:
        for detail, count in each.failures.most_common(3):
            click.echo(f"failed at {each.offered_per_s:g}/s, {count} times: {detail}")
    if markdown_path is not None:
        markdown_path.write_text(f"{title}\n\n{table}\n\n{NOTES}\n", encoding="utf-8")
    if plot_path is not None:
        plot(plot_path, title, summaries)
    if json_path is not None:
        write_json(json_path, _metrics(summaries))


def _loads(
    paths: Sequence[Path],
    rates: Sequence[float],
    num_requests: int,
    trace: Path | None,
    vocab_size: int | None,
    seed: int,
) -> list[Load]:
    """One for each rate, or the trace's. Raises UsageError: options are missing."""
    if trace is not None:
        if vocab_size is None or rates or paths:
            raise click.UsageError("--trace takes --vocab, and neither --workload nor --rate")
        return [of_trace(trace, vocab_size=vocab_size, seed=seed)]
    if len(paths) != 1 or not rates:
        raise click.UsageError("give one --workload and --rate, or --trace and --vocab")
    workload = load_workload(paths[0])
    return [
        poisson(workload, requests_per_s=rate, num_requests=num_requests, seed=seed)
        for rate in rates
    ]


async def _sweep(server: Server, loads: Sequence[Load], goals: Goals) -> list[Summary]:
    """Load after load: the next begins when the one before has its last answer."""
    summaries = []
    async with reached(server) as client:
        for offered_per_s, arrivals in loads:
            with tqdm(total=len(arrivals), desc=f"{offered_per_s:.3g} requests/s") as bar:
                outcomes, seconds = await offer(client, arrivals, on_end=bar.update)
            summaries.append(
                sum_up(outcomes, offered_per_s=offered_per_s, seconds=seconds, goals=goals)
            )
    return summaries


def _metrics(summaries: Sequence[Summary]) -> dict[str, float]:
    return {
        f"{name}_{each.offered_per_s:.3g}": value
        for each in summaries
        for name, value in each.metrics().items()
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
