"""Whose key is whose: the tenants of the public port."""

import tomllib
from pathlib import Path

from runtime.config import FrontendConfig, require, require_key
from runtime.errors import ConfigError

DEFAULT_TENANT = "default"
MAX_TENANT_CHARACTERS = 64


def read_tenants(config: FrontendConfig) -> dict[str, str]:
    """Tenants by their keys; empty where no key is configured.

    Raises ConfigError, which shows no key: the file of `api_keys` can't be read or used.
    """
    tenants = {} if config.api_key is None else {config.api_key: DEFAULT_TENANT}
    if config.api_keys is None:
        return tenants
    entries = _read(Path(config.api_keys))
    where = f"api_keys={config.api_keys}"
    require(bool(entries), f'{where} has no entry: it needs at least one, name = "key"')
    places = {} if config.api_key is None else {config.api_key: "api_key"}
    # Entries by their number, not their name: who swaps name and key has keys for names.
    for number, (name, key) in enumerate(entries.items(), start=1):
        entry = f"{where}: entry {number}"
        _check_name(entry, name)
        if not isinstance(key, str):
            raise ConfigError(f'{entry} is of type {type(key).__name__}: must be name = "key"')
        require_key(f"{entry}: a key", key)
        require(key not in places, f"{entry} has the key of {places.get(key)}: must be another")
        places[key] = f"entry {number}"
        tenants[key] = name
    return tenants


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"api_keys={path}: {error}") from error


def _check_name(entry: str, name: str) -> None:
    require(
        1 <= len(name) <= MAX_TENANT_CHARACTERS and name.isprintable(),
        f"{entry}: a name of {len(name)} characters must be printable and have 1 to "
        f"{MAX_TENANT_CHARACTERS}",
    )
