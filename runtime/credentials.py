"""What the ports and channels of this process show and ask for, from the options' files."""

from collections.abc import Callable
from typing import TypeVar

import grpc

from protos import tls
from runtime.errors import ConfigError

Made = TypeVar("Made")


def cluster_server_credentials(cluster_certs: str | None) -> grpc.ServerCredentials | None:
    """For a port inside the cluster; None, which is no TLS, where no folder is set.

    Raises ConfigError, which names the file: it can't be read or used, or has expired.
    """
    if cluster_certs is None:
        return None
    return _made(lambda: tls.server_credentials(cluster_certs), "cluster_certs")


def cluster_channel_credentials(cluster_certs: str | None) -> grpc.ChannelCredentials | None:
    """For a client of such a port; as `cluster_server_credentials`."""
    if cluster_certs is None:
        return None
    return _made(lambda: tls.channel_credentials(cluster_certs), "cluster_certs")


def public_server_credentials(
    tls_cert: str | None, tls_key: str | None, tls_client_ca: str | None
) -> grpc.ServerCredentials | None:
    """For a public port; None, which is no TLS, where no certificate is set.

    Raises ConfigError, which names the file: it can't be read or used, or has expired.
    """
    if tls_cert is None or tls_key is None:  # set together, as FrontendConfig asks
        return None
    return _made(
        lambda: tls.public_server_credentials(tls_cert, tls_key, tls_client_ca), "tls_cert"
    )


def _made(make: Callable[[], Made], option: str) -> Made:
    try:
        return make()
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
