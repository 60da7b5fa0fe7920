"""`lockstep models`: what can be served."""

import click


@click.command()
@click.option("--refused", is_flag=True, help="Show the types that aren't served, and why.")
def models(refused: bool) -> None:
    """Show which model types are served, as measured for this release.

    A checkpoint of another type, or of another version of transformers, is tested before it is
    served.
    """
    from runtime.model_support import read_results, table

    results = read_results()
    click.echo(f"Tested with transformers {results.transformers}, torch {results.torch}, on CPU.")
    for line in table(results, refused=refused):
        click.echo(line)
