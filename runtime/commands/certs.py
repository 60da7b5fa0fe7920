"""`lockstep certs`: what the processes of a cluster know each other by."""

from pathlib import Path

import click

from runtime.errors import ConfigError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--days", default=825, show_default=True, help="How long the certificate is good.")
@click.option(
    "--name",
    "names",
    multiple=True,
    help="Host name or address to make the certificate out to as well, for the public ports. "
    "May be given more than once.",
)
@click.option(
    "--renew", is_flag=True, help="Replace node.pem and node.key, from the CA in the folder."
)
def certs(folder: Path, days: int, names: tuple[str, ...], renew: bool) -> None:
    """Makes a private CA for a cluster, and the certificate that its processes show each other.

    Writes ca.pem, ca.key, node.pem and node.key to FOLDER. Copy ca.pem, node.pem and node.key to
    the same folder on every node and give it as --cluster-certs. ca.key is only for --renew: take
    it offline, as who has it can make certificates that the cluster trusts.
    """
    try:
        # Here, not above: it needs an extra that nothing else does.
        from runtime.certs import make_cluster, renew_node
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is missing: `lockstep certs` needs it, "
            'pip install "lockstep-serving[certs]"'
        ) from error
    if renew:
        renew_node(folder, days=days, names=names)
        click.echo(f"lockstep: {folder} has a new node.pem and node.key; copy them to every node")
        return
    make_cluster(folder, days=days, names=names)
    click.echo(
        f"lockstep: {folder} has ca.pem, node.pem and node.key, for every node, and ca.key, "
        "to be taken offline"
    )
