"""`lockstep top`: what a server does, live."""

import click


@click.command()
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="The server's HTTP port."
)
@click.option("--api-key", envvar="LOCKSTEP_API_KEY", show_envvar=True, help="A key of the server.")
@click.option(
    "--interval-s",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="How often to look.",
)
@click.option("--once", is_flag=True, help="Print what there is and end.")
def top(url: str, api_key: str | None, interval_s: float, once: bool) -> None:
    """Show steps, batches, blocks, queues and ranks of a server, until Ctrl-C."""
    from runtime.top import show

    show(url, api_key, interval_s=interval_s, once=once)
