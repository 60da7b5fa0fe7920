"""What is wrong with certificate files is said by name, before anything is served."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from protos import tls
from runtime import credentials
from runtime.certs import make_ca
from runtime.errors import ConfigError
from tests.cluster_certs import NOW, Nodes, save_nodes

pytestmark = pytest.mark.unit


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return save_nodes(tmp_path)


@pytest.mark.parametrize("make", [tls.server_credentials, tls.channel_credentials])
@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("expired", r"expired/node\.pem can't be used: certificate has expired"),
        ("misnamed", r"misnamed/node\.pem can't be used: Hostname mismatch"),
        ("none", r"none/ca\.pem can't be read: No such file"),
    ],
)
def test_a_cluster_takes_no_bad_certificate(
    make: object, node: str, message: str, nodes: Nodes, tmp_path: Path
) -> None:
    make(nodes.good)
    with pytest.raises(ValueError, match=message):
        make(tmp_path / node)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ca.pem", r"ca\.pem can't be read"),
        ("node.pem", r"node\.pem can't be read"),
        ("node.key", r"node\.key can't be read"),
    ],
)
def test_a_missing_file_is_named(name: str, message: str, nodes: Nodes) -> None:
    (nodes.good / name).unlink()
    with pytest.raises(ValueError, match=message):
        tls.server_credentials(nodes.good)


@pytest.mark.parametrize("name", ["ca.pem", "node.pem", "node.key"])
def test_a_file_of_something_else_is_named(name: str, nodes: Nodes) -> None:
    (nodes.good / name).write_text("something else")
    with pytest.raises(ValueError, match=rf"good/{name}.* PEM format"):
        tls.server_credentials(nodes.good)


def test_files_that_do_not_belong_together_are_refused(nodes: Nodes) -> None:
    for name in ("node.pem", "ca.pem"):
        there = nodes.good / name
        own = there.read_bytes()
        there.write_bytes((nodes.stranger / name).read_bytes())
        with pytest.raises(ValueError, match=r"node\.pem"):
            tls.channel_credentials(nodes.good)
        there.write_bytes(own)
    tls.channel_credentials(nodes.good)


def test_a_key_with_a_password_is_refused_without_asking(nodes: Nodes) -> None:
    key = make_ca(NOW).key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")
    )
    (nodes.good / "node.key").write_bytes(key)
    with pytest.raises(ValueError, match=r"node\.key is encrypted"):
        tls.server_credentials(nodes.good)


def public(folder: Path, client_ca: Path | None = None) -> tuple[str, str, str | None]:
    ca = None if client_ca is None else str(client_ca)
    return str(folder / "node.pem"), str(folder / "node.key"), ca


def test_public_ports_take_certificates_of_any_name_and_ca(nodes: Nodes) -> None:
    for node in (nodes.good, nodes.stranger, nodes.misnamed):
        assert credentials.public_server_credentials(*public(node)) is not None
    assert credentials.public_server_credentials(None, None, None) is None


def test_public_ports_take_nothing_that_clients_could_not(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match=r"tls_cert: .*node\.pem can't be .*has expired"):
        credentials.public_server_credentials(*public(nodes.expired))
    key = nodes.good / "node.key"
    with pytest.raises(ConfigError, match=r"node\.key holds no certificate in PEM format"):
        credentials.public_server_credentials(*public(nodes.good, client_ca=key))


def test_options_that_are_unset_mean_no_tls(nodes: Nodes) -> None:
    for make in (credentials.cluster_server_credentials, credentials.cluster_channel_credentials):
        assert make(None) is None
        assert make(str(nodes.good)) is not None
        with pytest.raises(ConfigError, match=r"cluster_certs: .*has expired"):
            make(str(nodes.expired))
