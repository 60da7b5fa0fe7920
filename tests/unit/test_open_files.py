"""How many connections fit into the files that a process may have open."""

import resource

import pytest

from runtime.frontend.http_connection import MAX_TOLD
from runtime.frontend.open_files import OTHER_FILES, allow_connections

pytestmark = pytest.mark.unit

NEEDED = 4 * 100 + MAX_TOLD + OTHER_FILES  # for 100 connections
NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "soft_after"),
    [
        (NEEDED, NEEDED, 100, NEEDED),
        (NO_LIMIT, NO_LIMIT, 100, NO_LIMIT),
        (NEEDED - 1, NO_LIMIT, 100, NEEDED),
        (64, 100_000, 100, NEEDED),
        (64, NEEDED - 100, 75, NEEDED - 100),
        (64, 128, 1, 128),
    ],
)
def test_the_limit_of_files_is_raised_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    allowed: int,
    soft_after: int,
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    assert allow_connections(100) == allowed
    assert limits[-1] == (soft_after, hard)
    assert ("max_connections=100 is more than" in caplog.text) == (allowed < 100)
