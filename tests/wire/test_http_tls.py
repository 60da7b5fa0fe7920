"""TLS at the HTTP port, with and without certificates of clients."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from protos.tls import CA_FILE, CERT_FILE, CLUSTER_NAME, KEY_FILE
from runtime.errors import ConfigError
from runtime.frontend.public_socket import bind
from tests.cluster_certs import Nodes, save_nodes
from tests.http_serving import CHUNK, HOST, OPTION, TIMEOUT_S, RunningHttp, wire

pytestmark = pytest.mark.wire

SOON_S = 0.3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    return save_nodes(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def server(nodes: Nodes) -> Iterator[RunningHttp]:
    with RunningHttp(**files(nodes.good)) as server:
        yield server


@pytest.fixture
def mutual(nodes: Nodes) -> Iterator[RunningHttp]:
    with RunningHttp(**files(nodes.good), tls_client_ca=str(nodes.good / CA_FILE)) as server:
        yield server


def files(node: Path) -> dict[str, str]:
    return {"tls_cert": str(node / CERT_FILE), "tls_key": str(node / KEY_FILE)}


def context_of(ca: Path, own: Path | None = None) -> ssl.SSLContext:
    """Of a client that trusts the CA in one folder and shows the certificate in another."""
    context = ssl.create_default_context(cafile=ca / CA_FILE)
    if own is not None:
        context.load_cert_chain(own / CERT_FILE, own / KEY_FILE)
    return context


def ask(server: RunningHttp, context: ssl.SSLContext) -> int:
    with wire(server, context, CLUSTER_NAME) as client:
        client.ask("/v1", body=b"abc")
        return client.read_answer().status


def test_who_trusts_the_ca_is_served(server: RunningHttp, nodes: Nodes) -> None:
    assert ask(server, context_of(nodes.good)) == 200


def test_who_trusts_another_ca_sends_nothing(server: RunningHttp, nodes: Nodes) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(server, context_of(nodes.stranger))
    assert ask(server, context_of(nodes.good)) == 200


def test_old_tls_is_refused(server: RunningHttp, nodes: Nodes) -> None:
    context = context_of(nodes.good)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1 is deprecated"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        ask(server, context)


def test_plain_http_at_a_tls_port_is_hung_up_on(server: RunningHttp, nodes: Nodes) -> None:
    with wire(server) as client:
        client.ask("/v1")
        assert b"200" not in client.read_to_end()
    assert ask(server, context_of(nodes.good)) == 200


def test_a_client_with_a_certificate_of_the_ca_is_served(mutual: RunningHttp, nodes: Nodes) -> None:
    assert ask(mutual, context_of(nodes.good, nodes.good)) == 200


@pytest.mark.parametrize("kind", ["stranger", "expired", "none"])
def test_a_client_without_a_good_certificate_is_refused(
    mutual: RunningHttp, nodes: Nodes, kind: str
) -> None:
    own = {"stranger": nodes.stranger, "expired": nodes.expired}.get(kind)
    context = context_of(nodes.good, own)
    # With TLS 1.3 a client learns it when it reads.
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(mutual, context)
    assert mutual.app.begun.empty()


def test_a_handshake_that_stops_is_cut_off(nodes: Nodes) -> None:
    with (
        RunningHttp(**files(nodes.good), read_timeout_s=SOON_S) as server,
        wire(server) as client,
    ):
        client.send(b"\x16\x03\x01")
        assert client.read_to_end() == b""


def test_a_slow_reader_by_tls_is_cut_off_and_costs_little(nodes: Nodes) -> None:
    with (
        RunningHttp(**files(nodes.good), write_timeout_s=SOON_S) as server,
        wire(server, context_of(nodes.good), CLUSTER_NAME) as client,
    ):
        client.ask("/flood")
        assert server.app.ended.get(timeout=TIMEOUT_S) == "cancelled"
        assert server.app.sent_bytes < 8 << 20


def test_what_waits_for_a_client_by_tls_is_little(server: RunningHttp, nodes: Nodes) -> None:
    with wire(server, context_of(nodes.good), CLUSTER_NAME) as client:
        client.ask("/flood")
        client.socket.recv(1)
        sizes = [size for _ in range(100) for size in server.call(server.buffer_sizes)]
        assert max(sizes) < 2 * len(CHUNK)
    assert server.app.ended.get(timeout=TIMEOUT_S)


def test_requests_too_long_can_be_read_of_by_tls(server: RunningHttp, nodes: Nodes) -> None:
    with wire(server, context_of(nodes.good), CLUSTER_NAME) as client:
        client.send(b"x" * (64 << 10))
        assert client.read_answer().status == 431
    with wire(server, context_of(nodes.good), CLUSTER_NAME) as client:
        client.ask("/v1", body=bytes(1 << 20))
        assert client.read_answer().status == 413


def test_a_grpc_client_by_tls_is_refused(server: RunningHttp, nodes: Nodes) -> None:
    credentials = grpc.ssl_channel_credentials((nodes.good / CA_FILE).read_bytes())
    options = [("grpc.ssl_target_name_override", CLUSTER_NAME)]
    with grpc.secure_channel(f"127.0.0.1:{server.port}", credentials, options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Generate(inference_pb2.GenerateRequest(), timeout=TIMEOUT_S))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "ALPN" in caught.value.details()


def test_files_that_cannot_be_used_are_refused_at_the_start(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for wrong in (
        {"tls_cert": str(tmp_path / "none"), "tls_key": str(nodes.good / KEY_FILE)},
        {"tls_cert": str(nodes.good / CERT_FILE), "tls_key": str(nodes.stranger / KEY_FILE)},
        files(nodes.expired),
        {**files(nodes.good), "tls_client_ca": str(tmp_path / "empty")},
    ):
        running = RunningHttp(**wrong)
        with (
            bind(HOST, 0, option=OPTION) as bound,
            pytest.raises(ConfigError, match=r"^tls_cert: "),
        ):
            running.make_server(bound)
