"""The CA of a cluster, and the certificate that all of its processes show each other.

Needs the package `cryptography`, of the extra `certs`; who only uses the files doesn't.
"""

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protos.tls import CA_FILE, CERT_FILE, CLUSTER_NAME, KEY_FILE
from runtime.errors import ConfigError

CA_KEY_FILE = "ca.key"
CA_DAYS = 3650
# They hold from a little earlier, for nodes whose clocks are behind.
CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_cluster(folder: Path, *, days: int, names: Sequence[str] = ()) -> None:
    """Makes a CA, and a certificate for the processes of a cluster that is good for `days`.

    `names` are host names and addresses that the certificate is made out to as well.
    Raises ConfigError: one of the files is there already, or can't be written, or an option is
    wrong.
    """
    wanted = [general_name(name) for name in (CLUSTER_NAME, *names)]
    for name in (CA_FILE, CA_KEY_FILE, CERT_FILE, KEY_FILE):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} is there already: take another folder, or --renew for a new "
                f"{CERT_FILE} from the CA there"
            )
    now = datetime.datetime.now(datetime.UTC)
    ca = make_ca(now)
    node = issue(ca, now, days=days, names=wanted)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error.strerror}") from error
    _write(folder, CA_KEY_FILE, _key_pem(ca.key), mode=0o600)
    _write(folder, CA_FILE, _pem(ca.certificate), mode=0o644)
    write_node(folder, node)


def renew_node(folder: Path, *, days: int, names: Sequence[str] = ()) -> None:
    """Replaces certificate and key by new ones from the CA in `folder`.

    The names stay as they are where none are given.
    Raises ConfigError: the CA or the names can't be read, or an option is wrong.
    """
    ca = _read_ca(folder)
    if names or not (folder / CERT_FILE).exists():
        wanted = [general_name(name) for name in (CLUSTER_NAME, *names)]
    else:
        wanted = _names_of(_load_certificate(folder / CERT_FILE))
    now = datetime.datetime.now(datetime.UTC)
    write_node(folder, issue(ca, now, days=days, names=wanted))


def make_ca(now: datetime.datetime) -> Pair:
    """A CA for nothing but certificates of ends."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own, so that no CA is taken for another.
    name = _common_name(f"Lockstep cluster CA {secrets.token_hex(8)}")
    usage = _usage("key_cert_sign", "crl_sign")
    builder = (
        _builder(key, now, now + datetime.timedelta(days=CA_DAYS))
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return Pair(certificate=builder.sign(key, hashes.SHA256()), key=key)


def issue(
    ca: Pair, now: datetime.datetime, *, days: int, names: Sequence[x509.GeneralName]
) -> Pair:
    """A certificate for clients and servers, which ends with its CA at the latest.

    Raises ConfigError: `days` are too few or too many, or the CA has expired.
    """
    if not 1 <= days <= CA_DAYS:
        raise ConfigError(f"days={days} must be in [1, {CA_DAYS}]")
    last = ca.certificate.not_valid_after_utc
    if last <= now:
        raise ConfigError(f"the CA has expired on {last:%Y-%m-%d}: make one in another folder")
    key = ec.generate_private_key(ec.SECP256R1())
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = (
        _builder(key, now, min(last, now + datetime.timedelta(days=days)))
        .subject_name(_common_name(CLUSTER_NAME))
        .issuer_name(ca.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(authority, critical=False)
    )
    return Pair(certificate=builder.sign(ca.key, hashes.SHA256()), key=key)


def general_name(name: str) -> x509.GeneralName:
    """Raises ConfigError: it is neither a host name nor an address."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not name or not name.isascii() or not name.isprintable() or set(name) & set(" /:@"):
        raise ConfigError(f"name={name!r} must be a host name or an address, without a port")
    return x509.DNSName(name)


def write_node(folder: Path, node: Pair) -> None:
    """Raises ConfigError: a file can't be written."""
    _write(folder, KEY_FILE, _key_pem(node.key), mode=0o600)
    _write(folder, CERT_FILE, _pem(node.certificate), mode=0o644)


def _builder(
    key: ec.EllipticCurvePrivateKey, start: datetime.datetime, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature="digital_signature" in allowed,
        key_cert_sign="key_cert_sign" in allowed,
        crl_sign="crl_sign" in allowed,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _names_of(certificate: x509.Certificate) -> list[x509.GeneralName]:
    return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def _read_ca(folder: Path) -> Pair:
    certificate = _load_certificate(folder / CA_FILE)
    path = folder / CA_KEY_FILE
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} holds no private key in PEM format: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != (
        key.public_key()
    ):
        raise ConfigError(f"{path} isn't the key of {folder / CA_FILE}")
    return Pair(certificate=certificate, key=key)


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate in PEM format: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error


def _write(folder: Path, name: str, data: bytes, *, mode: int) -> None:
    """Whole or not at all, and never readable for more than `mode` allows."""
    new = folder / f"{name}.new"
    try:
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        new.replace(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder / name} can't be written: {error.strerror}") from error


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
