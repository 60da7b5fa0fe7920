"""Folders of certificates, and credentials of those that ports must refuse."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.serialization import Encoding

from protos.tls import CA_FILE, CERT_FILE, CLUSTER_NAME, KEY_FILE
from runtime.certs import Pair, general_name, issue, make_ca, write_node

NOW = datetime.datetime.now(datetime.UTC)
A_YEAR_AGO = NOW - datetime.timedelta(days=365)


def save_node(
    folder: Path, ca: Pair, *, name: str = CLUSTER_NAME, made: datetime.datetime = NOW
) -> Path:
    """A node's files; they hold for ten days."""
    folder.mkdir(parents=True)
    write_node(folder, issue(ca, made, days=10, names=[general_name(name)]))
    (folder / CA_FILE).write_bytes(pem(ca))
    return folder


def pem(pair: Pair) -> bytes:
    return pair.certificate.public_bytes(Encoding.PEM)


@dataclass(frozen=True)
class Nodes:
    """Folders of one cluster's node, and of those that aren't quite one."""

    good: Path
    stranger: Path  # of another CA
    expired: Path
    misnamed: Path


def save_nodes(folder: Path) -> Nodes:
    ca = make_ca(A_YEAR_AGO)
    return Nodes(
        good=save_node(folder / "good", ca),
        stranger=save_node(folder / "stranger", make_ca(NOW)),
        expired=save_node(folder / "expired", ca, made=A_YEAR_AGO),
        misnamed=save_node(folder / "misnamed", ca, name="elsewhere"),
    )


def unchecked_client(folder: Path, *, with_certificate: bool = True) -> grpc.ChannelCredentials:
    """What `channel_credentials` would make, had it no eyes."""
    if not with_certificate:
        return grpc.ssl_channel_credentials((folder / CA_FILE).read_bytes())
    return grpc.ssl_channel_credentials(
        *((folder / name).read_bytes() for name in (CA_FILE, KEY_FILE, CERT_FILE))
    )


def unchecked_server(folder: Path) -> grpc.ServerCredentials:
    pair = ((folder / KEY_FILE).read_bytes(), (folder / CERT_FILE).read_bytes())
    return grpc.ssl_server_credentials([pair], (folder / CA_FILE).read_bytes(), True)
