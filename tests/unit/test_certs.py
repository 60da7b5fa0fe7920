"""`lockstep certs`: what is made, what is left alone, what is refused."""

import datetime
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from protos.tls import CLUSTER_NAME, channel_credentials
from runtime.certs import make_ca, make_cluster, renew_node
from runtime.commands.certs import certs
from runtime.errors import ConfigError
from tests.cluster_certs import A_YEAR_AGO, save_node

pytestmark = pytest.mark.unit

FILES = ["ca.key", "ca.pem", "node.key", "node.pem"]
DAY = datetime.timedelta(days=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(folder: Path, name: str = "node.pem") -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / name).read_bytes())


def names_of(certificate: x509.Certificate) -> list[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(certs, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_cluster_gets_a_ca_and_a_certificate(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    result = run(folder, "--days=30", "--name=api.example.org", "--name=10.0.0.7", "--name=::1")

    assert result.exit_code == 0
    assert sorted(contents(folder)) == FILES
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {name for name, mode in modes.items() if mode & 0o077 == 0} == {"ca.key", "node.key"}
    channel_credentials(folder)  # tries them on each other
    ca, node = load(folder, "ca.pem"), load(folder)
    node.verify_directly_issued_by(ca)
    assert names_of(node) == [CLUSTER_NAME, "api.example.org", "10.0.0.7", "::1"]
    left = node.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 29 * DAY < left <= 30 * DAY
    constraints = [
        each.extensions.get_extension_for_class(x509.BasicConstraints).value for each in (ca, node)
    ]
    assert [(each.ca, each.path_length) for each in constraints] == [(True, 0), (False, None)]


def test_two_clusters_have_different_cas(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_cluster(tmp_path / name, days=1)
    subjects = {load(tmp_path / name, "ca.pem").subject for name in ("one", "two")}
    assert len(subjects) == 2


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"{name} is there already: .*--renew"):
        make_cluster(tmp_path, days=1)
    assert contents(tmp_path) == {name: b"mine"}


def test_renewing_keeps_the_ca_and_the_names(tmp_path: Path) -> None:
    make_cluster(tmp_path, days=1, names=["api.example.org"])
    before = contents(tmp_path)

    run(tmp_path, "--renew", "--days=3")
    after = contents(tmp_path)
    assert {name for name in FILES if before[name] != after[name]} == {"node.key", "node.pem"}
    channel_credentials(tmp_path)
    assert names_of(load(tmp_path)) == [CLUSTER_NAME, "api.example.org"]

    renew_node(tmp_path, days=3, names=["other.example.org"])
    assert names_of(load(tmp_path)) == [CLUSTER_NAME, "other.example.org"]
    assert stat.S_IMODE((tmp_path / "node.key").stat().st_mode) == 0o600


def test_renewing_makes_up_for_a_node_that_was_lost(tmp_path: Path) -> None:
    make_cluster(tmp_path, days=1)
    for name in ("node.key", "node.pem"):
        (tmp_path / name).unlink()
    renew_node(tmp_path, days=1)
    channel_credentials(tmp_path)


def test_no_certificate_outlasts_its_ca(tmp_path: Path) -> None:
    node = load(save_node(tmp_path / "node", make_ca(A_YEAR_AGO - 3280 * DAY)))
    assert node.not_valid_after_utc < datetime.datetime.now(datetime.UTC) + 6 * DAY


def test_an_expired_ca_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the CA has expired on 20"):
        save_node(tmp_path / "node", make_ca(A_YEAR_AGO - 3650 * DAY))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ca.key", None, r"ca\.key can't be read: No such file"),
        ("ca.pem", None, r"ca\.pem can't be read: No such file"),
        ("ca.key", b"no key", r"ca\.key holds no private key in PEM format"),
        ("ca.pem", b"no certificate", r"ca\.pem holds no certificate in PEM format"),
        ("node.pem", b"no certificate", r"node\.pem holds no certificate in PEM format"),
    ],
)
def test_a_folder_that_cannot_be_renewed_stays(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    make_cluster(tmp_path, days=1)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=message):
        renew_node(tmp_path, days=1)
    assert contents(tmp_path) == before


def test_the_key_of_another_ca_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_cluster(tmp_path / name, days=1)
    (tmp_path / "one" / "ca.key").write_bytes((tmp_path / "two" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"one/ca\.key isn't the key of .*one/ca\.pem"):
        renew_node(tmp_path / "one", days=1)


@pytest.mark.parametrize("days", [-1, 0, 3651])
def test_days_have_limits(tmp_path: Path, days: int) -> None:
    with pytest.raises(ConfigError, match=rf"days={days} must be in \[1, 3650\]"):
        make_cluster(tmp_path / "new", days=days)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", "a b", "host:1", "https://host", "höst", "a\n"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must be a host name or an address"):
        make_cluster(tmp_path / "new", days=1, names=[name])
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/below can't be made: Not a directory"):
        make_cluster(tmp_path / "file" / "below", days=1)


def test_without_the_extra_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "runtime.certs")
    with pytest.raises(ConfigError, match=r'pip install "lockstep-serving\[certs\]"'):
        run(tmp_path / "new")
