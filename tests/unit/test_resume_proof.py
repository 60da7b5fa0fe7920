"""Proofs that a request was let in before: of what they are, and how often they are believed."""

from dataclasses import replace
from typing import Any

import pytest

from runtime.frontend import resume_proof
from runtime.frontend.resume_proof import MAX_USES, ResumeProofs
from runtime.request import Request
from tests.params import complete_params

pytestmark = pytest.mark.unit

FINGERPRINT = "0f" * 16


def make_request(**changes: Any) -> Request:
    request = Request(
        request_id=1,
        prompt_token_ids=[3, 4, 5],
        params=complete_params(max_tokens=9, n=2),
        seed=7,
        tenant="acme",
    )
    return replace(request, **changes)


def test_servers_with_the_same_engine_token_believe_each_other() -> None:
    proof = ResumeProofs("token").of(make_request(), FINGERPRINT)
    assert ResumeProofs("token").use(proof, make_request(request_id=2), FINGERPRINT)
    assert not ResumeProofs("another").use(proof, make_request(), FINGERPRINT)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [3, 4, 5, 6]},
        {"seed": 8},
        {"tenant": "other"},
        {"priority": -1},
        {"params": complete_params(max_tokens=10, n=2)},
        {"params": complete_params(max_tokens=9, n=3)},
    ],
    ids=str,
)
def test_it_shows_nothing_of_another_request(changes: dict[str, Any]) -> None:
    proofs = ResumeProofs("token")
    proof = proofs.of(make_request(), FINGERPRINT)
    assert not proofs.use(proof, make_request(**changes), FINGERPRINT)
    assert not proofs.use(proof, make_request(), "another")
    assert proofs.use(proof, make_request(), FINGERPRINT)


@pytest.mark.parametrize("proof", [b"", b"0" * 32, b"\xff" * 1000])
def test_what_is_made_up_shows_nothing(proof: bytes) -> None:
    assert not ResumeProofs("token").use(proof, make_request(), FINGERPRINT)


def test_it_is_believed_a_few_times() -> None:
    proofs = ResumeProofs("token")
    request = make_request()
    proof = proofs.of(request, FINGERPRINT)
    used = [proofs.use(proof, request, FINGERPRINT) for _ in range(MAX_USES + 3)]
    assert used == [True] * MAX_USES + [False] * 3


def test_uses_are_forgotten_the_longest_unused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_proof, "MAX_REMEMBERED", 2)
    proofs = ResumeProofs("token")
    requests = [make_request(seed=seed) for seed in range(3)]
    for request in (requests[0], *[requests[1]] * MAX_USES, requests[2], requests[1]):
        last = proofs.use(proofs.of(request, FINGERPRINT), request, FINGERPRINT)
    assert not last
    assert len(proofs._num_uses) == 2
