"""Whose key is whose: the tenants of the public port."""

import logging
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from protos.auth import KeyRing, digest
from runtime.config import require, require_key
from runtime.errors import ConfigError
from runtime.frontend_config import FrontendConfig

logger = logging.getLogger(__name__)

HASHED = "sha256:"
HASH = re.compile("[0-9a-fA-F]{64}")
DEFAULT_TENANT = "default"
MAX_TENANT_CHARACTERS = 64


def hashed(key: str) -> str:
    """How a key is kept at rest. Raises ConfigError, without the key: it can't be sent."""
    require_key("a key", key)
    return HASHED + digest(key).hex()


def make_key_ring(config: FrontendConfig) -> KeyRing:
    """Who may call a frontend; keys that are kept as such are warned of.

    Raises ConfigError, which shows no key: there is none, or the file can't be used.
    """
    entries = _read(config.api_keys)
    tenants = _tenants(config, entries)
    if not tenants:
        raise ConfigError("api_key and api_keys are unset: the port would be open to everyone")
    num_plain = sum(not _is_hashed(str(key)) for key in entries.values())
    if num_plain:
        logger.warning(
            "api_keys=%s has keys as such, %d of them: put in place of each what "
            "`lockstep hash-key` makes of it, which is of no use to who reads it",
            config.api_keys,
            num_plain,
        )
    return KeyRing(tenants)


def read_tenants(config: FrontendConfig) -> dict[bytes, str]:
    """Tenants by the digests of their keys; empty where no key is configured.

    Raises ConfigError, which shows no key: a key can't be used, or the file of `api_keys` can't.
    """
    return _tenants(config, _read(config.api_keys))


def _tenants(config: FrontendConfig, entries: Mapping[str, object]) -> dict[bytes, str]:
    tenants: dict[bytes, str] = {}
    places: dict[bytes, str] = {}
    if config.api_key is not None:
        own = _digest_of("api_key", config.api_key)
        tenants[own] = DEFAULT_TENANT
        places[own] = "api_key"
    if config.api_keys is None:
        return tenants
    where = f"api_keys={config.api_keys}"
    require(bool(entries), f'{where} has no entry: it needs at least one, name = "key"')
    # Entries by their number, not their name: who swaps name and key has keys for names.
    for number, (name, key) in enumerate(entries.items(), start=1):
        entry = f"{where}: entry {number}"
        _check_name(entry, name)
        if not isinstance(key, str):
            raise ConfigError(f'{entry} is of type {type(key).__name__}: must be name = "key"')
        found = _digest_of(f"{entry}: a key", key)
        require(found not in places, f"{entry} has the key of {places.get(found)}: must be another")
        places[found] = f"entry {number}"
        tenants[found] = name
    return tenants


def _is_hashed(key: str) -> bool:
    return key.startswith(HASHED)


def _digest_of(what: str, key: str) -> bytes:
    """Of a key as such or hashed."""
    if not _is_hashed(key):
        require_key(what, key)
        return digest(key)
    digits = key.removeprefix(HASHED)
    require(
        HASH.fullmatch(digits) is not None,
        f"{what} begins with {HASHED} and has {len(digits)} characters after it, must have 64 "
        "hexadecimal digits, as `lockstep hash-key` prints them",
    )
    return bytes.fromhex(digits)


def _read(api_keys: str | None) -> dict[str, object]:
    if api_keys is None:
        return {}
    try:
        return tomllib.loads(Path(api_keys).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"api_keys={api_keys}: {error}") from error


def _check_name(entry: str, name: str) -> None:
    require(
        1 <= len(name) <= MAX_TENANT_CHARACTERS and name.isprintable(),
        f"{entry}: a name of {len(name)} characters must be printable and have 1 to "
        f"{MAX_TENANT_CHARACTERS}",
    )
