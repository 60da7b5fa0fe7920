"""Which of a test's cases `make test` runs: the others wait for `make check-full`."""

from collections.abc import Iterable

import pytest


def quick(cases: Iterable[object], *chosen: object) -> list[object]:
    """All cases, for `parametrize`; those that aren't chosen are marked `full`.

    A case of several arguments is a tuple of them.
    """
    every = list(cases)
    assert all(each in every for each in chosen), "a chosen case is gone"
    return [each if each in chosen else full(each) for each in every]


def full(case: object) -> object:
    """One case for `parametrize`, marked `full`."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
