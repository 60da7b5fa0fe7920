"""`python -m benchmarks`: one command, a sub-command for each thing shown or measured."""

import click


class Benchmarks(click.Group):
    """Imports a sub-command when it is asked for: one needs gRPC, another must not load it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [
            "chaos",
            "demo",
            "overhead",
            "overload",
            "pauses",
            "publish",
            "sampler",
            "scheduler",
            "simulate",
            "soak",
        ]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        match name:
            case "chaos":
                from benchmarks.chaos.cli import chaos

                return chaos
            case "demo":
                from benchmarks.demo import main

                return main
            case "overhead":
                from benchmarks.overhead.cli import overhead

                return overhead
            case "overload":
                from benchmarks.overload.cli import overload

                return overload
            case "pauses":
                from benchmarks.pauses import pauses

                return pauses
            case "publish":
                from benchmarks.publish import publish

                return publish
            case "sampler":
                from benchmarks.sampler.cli import sampler

                return sampler
            case "scheduler":
                from benchmarks.scheduler.cli import scheduler

                return scheduler
            case "simulate":
                from benchmarks.simulate.cli import simulate

                return simulate
            case "soak":
                from benchmarks.soak.cli import soak

                return soak
            case _:
                return None


@click.command(cls=Benchmarks, context_settings={"max_content_width": 100})
def benchmarks() -> None:
    """Show and measure Lockstep."""


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
