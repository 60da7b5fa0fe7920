"""`python -m benchmarks multinode`: one model inside a node, and across nodes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.chaos.model import write_model
from benchmarks.multinode.measure import PARTS, Load, Measured, Place, measure
from benchmarks.multinode.network import Network
from benchmarks.multinode.plot import plot
from benchmarks.multinode.ray_nodes import RayNodes
from benchmarks.report import json_option, machine_line, markdown_row, smoke_option, write_json
from benchmarks.simulate.plot import require_matplotlib

# What is measured, by Ray's name for it.
PLACEMENTS = {"inside": "strict_pack", "across": "strict_spread"}
HEADERS = ("ranks", "start s", "tokens/s", *(f"{part} ms" for part in PARTS), "recovery s", "other")
NOTES = """\
inside: all ranks on one node. across: a node for each. Step times are means of the engine's own
parts; wire has what transport and the slowest rank add to rank 0's forward pass and sampling.
recovery: the longest pause of a stream in which a rank was killed. other: streams that got other
tokens then. Nodes are network namespaces on this machine unless there is an address: ranks share
its cores, and figures tell what the way between nodes costs, not what more machines bring."""


@click.command("multinode")
@click.option("--nodes", type=click.IntRange(2, 16), default=2, show_default=True)
@click.option(
    "--delay-ms",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Added to each round trip between nodes.",
)
@click.option(
    "--address", help="host:port of a Ray cluster to use; one on this machine is made where unset."
)
@click.option("--model", default="demo", show_default=True)
@click.option("--tp", type=click.IntRange(2), default=2, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--streams", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=128, show_default=True)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw it to this PNG file (extra `bench`).",
)
@json_option
@smoke_option
def multinode(
    nodes: int,
    delay_ms: float,
    address: str | None,
    model: str,
    tp: int,
    device: str,
    streams: int,
    tokens: int,
    plot_path: Path | None,
    json_path: Path | None,
    smoke: bool,
) -> None:
    """Measure a model whose ranks are on one node, and on several.

    \b
    Metrics (CASE: inside, across):
      tokens_per_s_CASE        of all streams together
      step_ms_PART_CASE        PART: schedule, encode, wire, forward, sample, publish, total
      recovery_s_CASE          none where no rank is on this machine
      start_s_CASE, differing_CASE
    """  # noqa: D301 - click wants the backspace itself
    if address is not None and delay_ms:
        raise click.UsageError("delay_ms is for nodes on this machine: leave it or address out")
    if address is None and tp > nodes:
        raise click.UsageError(f"tp={tp} ranks on a node each need as many --nodes, not {nodes}")
    if plot_path is not None:
        require_matplotlib()
    load = Load(num_streams=streams, num_tokens=tokens)
    options = [f"--tp={tp}", f"--device={device}", "--launcher=ray"]
    if device == "cpu":
        options.append("--threads-per-rank=1")
    where = address or f"{nodes} nodes on this machine, {delay_ms:g} ms added"
    click.echo(f"{machine_line()}; {where}; {streams} streams of {tokens} tokens, tp {tp}\n")
    click.echo(f"{NOTES}\n")
    with TemporaryDirectory() as folder:
        if smoke:
            load = Load(num_streams=2, num_tokens=16)
            write_model(Path(folder))
            model = folder
        options.append(f"--model={model}")
        with _place(nodes, delay_ms / 1000, address, tp, options) as place:
            found = _measure_all(place, load)
    if plot_path is not None:
        plot(plot_path, where, found)
    if json_path is not None:
        write_json(json_path, metrics_of(found))


@contextmanager
def _place(
    num_nodes: int, delay_s: float, address: str | None, tp: int, options: Sequence[str]
) -> Iterator[Place]:
    """A Ray cluster, and how a server joins it."""
    if address is not None:
        yield Place(options=[*options, f"--ray-address={address}"], variables={}, prefix=())
        return
    with (
        Network(num_nodes, delay_s=delay_s) as network,
        RayNodes(network, cpus_per_node=tp) as nodes,
    ):
        where = [f"--ray-address={nodes.address}", f"--host={network.addresses[0]}"]
        yield Place(
            options=[*options, *where],
            variables=nodes.environment,
            prefix=network.command(0, []),
        )


def _measure_all(place: Place, load: Load) -> Mapping[str, Measured]:
    """Case by case; a line of the table for each."""
    click.echo(markdown_row(HEADERS) + "\n" + markdown_row(["---"] * len(HEADERS)))
    found = {}
    for name, placement in PLACEMENTS.items():
        options = [*place.options, f"--placement={placement}"]
        here = Place(options=options, variables=place.variables, prefix=place.prefix)
        found[name] = measured = measure(here, load)
        steps = [measured.step_ms[part] for part in PARTS]
        click.echo(
            markdown_row(
                (
                    *(name, measured.start_s, measured.tokens_per_s, *steps),
                    *(measured.recovery_s, measured.num_differing),
                )
            )
        )
    return found


def metrics_of(found: Mapping[str, Measured]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, measured in found.items():
        metrics[f"start_s_{name}"] = measured.start_s
        metrics[f"tokens_per_s_{name}"] = measured.tokens_per_s
        metrics |= {f"step_ms_{part}_{name}": value for part, value in measured.step_ms.items()}
        if measured.recovery_s is not None:
            metrics[f"recovery_s_{name}"] = measured.recovery_s
        metrics[f"differing_{name}"] = float(measured.num_differing)
    return metrics
