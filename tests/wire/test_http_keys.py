"""Who may use the HTTP port."""

from collections.abc import Iterator

import pytest

from tests.http_serving import KEY, TENANT, RunningHttp, wire

pytestmark = pytest.mark.wire


@pytest.fixture
def server() -> Iterator[RunningHttp]:
    with RunningHttp() as server:
        yield server


def head(path: str, *authorizations: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: test"]
    lines += [f"authorization: {each}" for each in authorizations]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    "authorizations",
    [
        [f"Bearer {KEY}"],
        [f"bearer {KEY}"],
        [f"Bearer   {KEY} "],
        ["Basic YTpi", f"Bearer {KEY}"],
    ],
)
def test_a_key_says_whose_the_request_is(server: RunningHttp, authorizations: list[str]) -> None:
    with wire(server) as client:
        client.send(head("/v1", *authorizations))
        answer = client.read_answer()
        assert answer.status == 200
        assert f'"tenant": "{TENANT}"'.encode() in answer.body


@pytest.mark.parametrize(
    "authorizations",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        ["Bearer other"],
        [f"Bearer {KEY}x"],
        [f"Bearer {KEY[:-1]}"],
        [f"Basic {KEY}"],
        [KEY],
        ["Bearer \xff\xfe"],
    ],
)
def test_without_a_key_nothing_is_served(server: RunningHttp, authorizations: list[str]) -> None:
    with wire(server) as client:
        client.send(head("/v1", *authorizations))
        answer = client.read_answer()
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "bearer"
        assert answer.error == {
            "message": "this request needs the header `Authorization: Bearer KEY` with a key of "
            "this server",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
        assert client.read_to_end() == b""
    assert server.app.begun.empty()


def test_strangers_are_refused_before_their_body_is_read(server: RunningHttp) -> None:
    with wire(server) as client:
        client.send(
            b"POST /v1 HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\n"
            b"content-length: 1000\r\n\r\n"
        )
        assert client.read_answer().status == 401


@pytest.mark.parametrize("path", ["/health", "/", "/static/app.js", "/health?full=1"])
def test_some_paths_are_open(server: RunningHttp, path: str) -> None:
    with wire(server) as client:
        client.ask(path, key=None)
        answer = client.read_answer()
        assert answer.status == 200
        assert b'"tenant": ""' in answer.body
        client.ask(path)
        assert f'"tenant": "{TENANT}"'.encode() in client.read_answer().body


@pytest.mark.parametrize(
    "path", ["/health/", "/healthy", "/static", "/metrics", "//", "/x?/health", "/%2fhealth"]
)
def test_what_only_looks_like_an_open_path_is_not(server: RunningHttp, path: str) -> None:
    with wire(server) as client:
        client.ask(path, key=None)
        assert client.read_answer().status == 401
