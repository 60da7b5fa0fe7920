"""TLS between our own processes and at the public ports.

In a cluster both ends show a certificate of its own CA, made out to CLUSTER_NAME: on which host a
process runs, and by which address it is reached, doesn't matter. What is wrong with the files is
said here, at the start: gRPC would tell of it at the first call, in OpenSSL's words.
"""

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

CLUSTER_NAME = "lockstep-cluster"
CA_FILE = "ca.pem"
CERT_FILE = "node.pem"
KEY_FILE = "node.key"

Options = Sequence[tuple[str, Any]]

_NAME_OPTIONS = (("grpc.ssl_target_name_override", CLUSTER_NAME),)
_HUNG_UP = (
    "it hung up at once: cluster_certs must be set on both sides or on none, with certificates "
    "of one CA that have not expired"
)
# What gRPC says of a connection that didn't come about, and what it means between our ports.
_CAUSES = (
    ("WRONG_VERSION_NUMBER", "it speaks no TLS: set cluster_certs there too, or not here"),
    ("certificate has expired", "its certificate has expired: use `lockstep certs --renew`"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is of another CA than ours"),
    ("Hostname Verification", f"its certificate isn't made out to {CLUSTER_NAME}"),
    ("Socket closed", _HUNG_UP),
    ("Connection reset", _HUNG_UP),
    ("Broken pipe", _HUNG_UP),
)


def server_credentials(folder: str | Path) -> grpc.ServerCredentials:
    """For a port inside the cluster, which refuses clients without a certificate of its CA.

    Raises ValueError, which names the file: it can't be read or used, or has expired.
    """
    ca, cert, key = _cluster_files(folder)
    return grpc.ssl_server_credentials(
        [(_read(key), _read(cert))], root_certificates=_read(ca), require_client_auth=True
    )


def channel_credentials(folder: str | Path) -> grpc.ChannelCredentials:
    """For a client of such a port. Raises ValueError as `server_credentials`."""
    ca, cert, key = _cluster_files(folder)
    return grpc.ssl_channel_credentials(
        root_certificates=_read(ca), private_key=_read(key), certificate_chain=_read(cert)
    )


def public_server_credentials(
    cert: str | Path, key: str | Path, client_ca: str | Path | None = None
) -> grpc.ServerCredentials:
    """For a public gRPC port; with `client_ca` clients need a certificate too.

    Raises ValueError, which names the file: it can't be read or used, or has expired.
    """
    public_server_context(cert, key, client_ca)
    return grpc.ssl_server_credentials(
        [(_read(key), _read(cert))],
        root_certificates=None if client_ca is None else _read(client_ca),
        require_client_auth=client_ca is not None,
    )


def public_server_context(
    cert: str | Path, key: str | Path, client_ca: str | Path | None = None
) -> ssl.SSLContext:
    """The same for a public HTTP port."""
    # Of a certificate whose CA is somebody else's, only the time can be checked here.
    trusting = _context(ssl.PROTOCOL_TLS_CLIENT, cert, None, ca=cert)
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.check_hostname = False
    _shake_hands(trusting, _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca=None), None, cert)
    return _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca=client_ca)


def add_port(
    server: Any,  # of grpc or grpc.aio
    address: str,
    credentials: grpc.ServerCredentials | None,
) -> int:
    """Binds a port, without TLS where `credentials` is None; returns its number.

    Raises RuntimeError: it can't be bound.
    """
    if credentials is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, credentials))


def open_channel(
    address: str, options: Options, credentials: grpc.ChannelCredentials | None
) -> grpc.Channel:
    """A channel to a port inside the cluster, without TLS where `credentials` is None."""
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=(*options, *_NAME_OPTIONS))


def open_aio_channel(
    address: str, options: Options, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    """As `open_channel`."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=(*options, *_NAME_OPTIONS))


def explain(details: str) -> str:
    """What gRPC says of a failed call, after our own words where TLS was the reason."""
    if not details.startswith("failed to connect"):
        return details
    for sign, cause in _CAUSES:
        if sign in details:
            return f"{cause} ({details})"
    return details


def _cluster_files(folder: str | Path) -> tuple[Path, Path, Path]:
    """CA, certificate and key, once they have been tried on each other."""
    ca, cert, key = (Path(folder) / name for name in (CA_FILE, CERT_FILE, KEY_FILE))
    server = _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca=ca)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca=ca)
    _shake_hands(client, server, CLUSTER_NAME, cert)
    return ca, cert, key


def _context(
    protocol: int, cert: str | Path, key: str | Path | None, *, ca: str | Path | None
) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        _read(ca)
        try:
            context.load_verify_locations(cafile=ca)
        except ssl.SSLError as error:
            raise ValueError(f"{ca} holds no certificate in PEM format: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    if key is not None:
        _read(cert)
        _read(key)
        try:
            context.load_cert_chain(cert, key, password=lambda: _refuse_password(key))
        except ssl.SSLError as error:
            raise ValueError(
                f"{cert} and {key} aren't a certificate and its key in PEM format: {error}"
            ) from error
    return context


def _refuse_password(key: str | Path) -> str:
    raise ValueError(f"{key} is encrypted: a server can't ask for its password")


def _shake_hands(
    client: ssl.SSLContext, server: ssl.SSLContext, name: str | None, cert: str | Path
) -> None:
    """Lets both sides of TLS meet in memory, as they will later on the wire."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in tuple(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise ValueError(f"{cert} can't be used: {error.verify_message}") from error
            except ssl.SSLError as error:
                raise ValueError(f"{cert} can't be used: {error}") from error
            ends.remove(end)


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
