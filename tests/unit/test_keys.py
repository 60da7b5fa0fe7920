"""The file of tenants and their keys."""

import hashlib
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from runtime.commands.hash_key import hash_key
from runtime.errors import ConfigError
from runtime.frontend.keys import hashed, make_key_ring, read_tenants
from runtime.frontend_config import FrontendConfig

pytestmark = pytest.mark.unit

SECRET = "sk-secret"


def tenants_of(names: dict[str, str]) -> dict[bytes, str]:
    return {hashlib.sha256(key.encode()).digest(): name for key, name in names.items()}


def read(path: Path, text: str, api_key: str | None = None) -> dict[bytes, str]:
    path.write_text(text, encoding="utf-8")
    return read_tenants(FrontendConfig(api_key=api_key, api_keys=str(path)))


def test_without_a_file_there_is_one_tenant_or_none() -> None:
    assert read_tenants(FrontendConfig()) == {}
    assert read_tenants(FrontendConfig(api_key="a key")) == tenants_of({"a key": "default"})


def test_a_file_names_tenants_and_stands_next_to_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    text = f'acme = "a"\n"Übung & Söhne" = "b"\n{"x" * 64} = "c"\n'
    tenants = {"a": "acme", "b": "Übung & Söhne", "c": "x" * 64}
    assert read(path, text) == tenants_of(tenants)
    assert read(path, text, api_key="d") == tenants_of(tenants | {"d": "default"})


def test_the_tenant_of_the_key_may_have_another(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    tenants = tenants_of({"a": "default", "b": "default"})
    assert read(path, 'default = "a"', api_key="b") == tenants


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
        (f'a = "sha256:{SECRET}"', "entry 1: a key begins with sha256: and has 9 characters after"),
        ('a = "sha256:"', "has 0 characters after it, must have 64 hexadecimal digits"),
        (f'a = "sha256:{"secret--" * 8}"', "has 64 characters after it, must have 64 hexadecimal"),
        (f'a = "{SECRET}"\nb = "{hashed(SECRET)}"', "entry 2 has the key of entry 1"),
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


def test_hashed_keys_stand_for_themselves(tmp_path: Path) -> None:
    text = f'acme = "{hashed("a")}"\nother = "{hashed("b").upper().replace("SHA", "sha")}"'
    tenants = {"a": "acme", "b": "other", "c": "default"}
    assert read(tmp_path / "keys.toml", text, api_key=hashed("c")) == tenants_of(tenants)


@pytest.mark.parametrize("key", ["sha256:abc", f"sha256:{'x' * 64}", f"sha256:{'0' * 65}"])
def test_a_hash_that_is_none_is_refused_as_the_option_too(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key begins with sha256: and has"):
        read_tenants(FrontendConfig(api_key=key))


def test_keys_as_such_are_warned_of_without_showing_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'a = "{SECRET}"\nb = "{hashed("b")}"\nc = "{SECRET}-c"')
    ring = make_key_ring(FrontendConfig(api_keys=str(path)))

    assert [ring.name_of_token(key) for key in (SECRET, "b", "d")] == ["a", "b", None]
    assert ring.name_of_token(hashed("b")) is None
    (message,) = caplog.messages
    assert f"{path} has keys as such, 2 of them" in message
    assert "secret" not in message


def test_hashed_keys_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'b = "{hashed("b")}"')
    with caplog.at_level(logging.DEBUG):
        make_key_ring(FrontendConfig(api_keys=str(path), api_key="as such"))
    assert caplog.messages == []


def test_a_ring_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="api_key and api_keys are unset"):
        make_key_ring(FrontendConfig())


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_hash_key_reads_a_key(end: str) -> None:
    key = "sk-" + "0123456789" * 2
    result = CliRunner().invoke(hash_key, input=key + end)
    assert result.exit_code == 0
    assert result.output == hashed(key) + "\n"
    assert hashed(key) == "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def test_hash_key_warns_of_keys_that_can_be_guessed() -> None:
    result = CliRunner().invoke(hash_key, input="hunter2")
    assert result.stdout == hashed("hunter2") + "\n"
    assert "a key of 7 characters may be guessed" in result.stderr


def test_hash_key_makes_a_key() -> None:
    key, shown = (
        line.split()[1] for line in CliRunner().invoke(hash_key, ["--make"]).output.splitlines()
    )
    assert len(key) >= 32
    assert shown == hashed(key)
    assert CliRunner().invoke(hash_key, ["--make"]).output.split()[1] != key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "standard input has 0 lines"),
        (f"{SECRET}\n{SECRET}\n".encode(), "standard input has 2 lines"),
        (b"\n", "a key of 0 characters must be printable ASCII"),
        (f"{SECRET} ".encode(), "a key of 10 characters must be printable ASCII"),
        (SECRET.encode() + b"\xff", "a key of 10 characters must be printable ASCII"),
    ],
)
def test_hash_key_refuses_what_cannot_be_sent(text: bytes, message: str) -> None:
    result = CliRunner().invoke(hash_key, input=text)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert SECRET not in str(result.exception) + result.output
