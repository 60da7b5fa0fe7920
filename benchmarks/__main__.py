"""`python -m benchmarks`: one command, a sub-command for each thing shown or measured."""

from importlib import import_module

import click

# Each has the command of its name.
MODULES = {
    "chaos": "benchmarks.chaos.cli",
    "compare": "benchmarks.compare.cli",
    "demo": "benchmarks.demo",
    "floor": "benchmarks.floor.cli",
    "guard": "benchmarks.guard.cli",
    "latency": "benchmarks.latency",
    "make-model": "benchmarks.make_model",
    "multinode": "benchmarks.multinode.cli",
    "overhead": "benchmarks.overhead.cli",
    "overload": "benchmarks.overload.cli",
    "pauses": "benchmarks.pauses",
    "publish": "benchmarks.publish",
    "sampler": "benchmarks.sampler.cli",
    "scheduler": "benchmarks.scheduler.cli",
    "serve": "benchmarks.serve.cli",
    "simulate": "benchmarks.simulate.cli",
    "soak": "benchmarks.soak.cli",
    "throughput": "benchmarks.throughput",
    "workload": "benchmarks.workloads.cli",
}


class Benchmarks(click.Group):
    """Imports a sub-command when it is asked for: one needs gRPC, another must not load it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(MODULES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in MODULES:
            return None
        command: click.Command = vars(import_module(MODULES[name]))[name.replace("-", "_")]
        return command


@click.command(cls=Benchmarks, context_settings={"max_content_width": 100})
def benchmarks() -> None:
    """Show and measure Lockstep."""


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
