"""The file of tenants and their keys."""

from pathlib import Path

import pytest

from runtime.config import FrontendConfig
from runtime.errors import ConfigError
from runtime.frontend.keys import read_tenants

pytestmark = pytest.mark.unit

SECRET = "sk-secret"


def read(path: Path, text: str, api_key: str | None = None) -> dict[str, str]:
    path.write_text(text, encoding="utf-8")
    return read_tenants(FrontendConfig(api_key=api_key, api_keys=str(path)))


def test_without_a_file_there_is_one_tenant_or_none() -> None:
    assert read_tenants(FrontendConfig()) == {}
    assert read_tenants(FrontendConfig(api_key="a key")) == {"a key": "default"}


def test_a_file_names_tenants_and_stands_next_to_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    text = f'acme = "a"\n"Übung & Söhne" = "b"\n{"x" * 64} = "c"\n'
    tenants = {"a": "acme", "b": "Übung & Söhne", "c": "x" * 64}
    assert read(path, text) == tenants
    assert read(path, text, api_key="d") == tenants | {"d": "default"}


def test_the_tenant_of_the_key_may_have_another(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    assert read(path, 'default = "a"', api_key="b") == {"a": "default", "b": "default"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no entry: it needs at least one"),
        ("# nothing\n", "has no entry"),
        (f"acme = {SECRET}", "Invalid value"),
        (f'acme = "{SECRET}', "Unterminated string"),
        (f'acme = "x"\nacme = "{SECRET}"', "Cannot overwrite a value"),
        (f'acme = ["{SECRET}"]', "entry 1 is of type list"),
        (f'[tenants]\nacme = "{SECRET}"', "entry 1 is of type dict"),
        (f'a.cme = "{SECRET}"', "entry 1 is of type dict"),
        ("ok = 'x'\nacme = 17", "entry 2 is of type int"),
        (f'"" = "{SECRET}"', "entry 1: a name of 0 characters must be printable and have 1 to 64"),
        (f'{"x" * 65} = "{SECRET}"', "a name of 65 characters must be printable and have 1 to 64"),
        (f'"a\\nb" = "{SECRET}"', "a name of 3 characters must be printable"),
        ('acme = ""', "entry 1: a key of 0 characters must be printable ASCII"),
        (f'acme = "{SECRET} "', "entry 1: a key of 10 characters must be .* without space"),
        (f'acme = "{SECRET}ü"', "a key of 10 characters must be printable ASCII"),
        (f'acme = "{SECRET}\\u0007"', "a key of 10 characters must be printable ASCII"),
        (
            f'a = "{SECRET}"\nb = "x"\nc = "{SECRET}"',
            "entry 3 has the key of entry 1: must be another",
        ),
        (f'{SECRET}-1 = "acme"\n{SECRET}-2 = "acme"', "entry 2 has the key of entry 1"),
        (f"{SECRET} = 1", "entry 1 is of type int"),
    ],
)
def test_a_wrong_file_is_refused_without_its_keys(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(ConfigError, match=message) as raised:
        read(path, text)
    assert str(raised.value).startswith(f"api_keys={path}")
    assert "secret" not in str(raised.value)


def test_the_key_of_the_option_is_nobody_elses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="entry 2 has the key of api_key") as raised:
        read(tmp_path / "keys.toml", f'a = "x"\nb = "{SECRET}"', api_key=SECRET)
    assert SECRET not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml.*No such file"):
        read_tenants(FrontendConfig(api_keys=str(tmp_path / "none.toml")))
    with pytest.raises(ConfigError, match="Is a directory"):
        read_tenants(FrontendConfig(api_keys=str(tmp_path)))
    path = tmp_path / "latin.toml"
    path.write_bytes(b'a = "\xff"')
    with pytest.raises(ConfigError, match=r"latin\.toml.*utf-8"):
        read_tenants(FrontendConfig(api_keys=str(path)))
