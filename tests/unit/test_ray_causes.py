"""Which deaths of actors come from outside, by Ray's words."""

import pytest

from runtime.cluster.ray_launcher import died_with_its_node

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("cause", "is_outside"),
    [
        ("The actor died because its node has died. Node Id: 5f", True),
        ("The actor can't be reached because its node is dead", True),
        ("The actor is dead because its worker process has died. Worker exit type: 1", False),
        ("KeyError: 'node' in forward, on node 10.0.0.1", False),
    ],
)
def test_only_a_lost_node_is_outside(cause: str, is_outside: bool) -> None:
    assert died_with_its_node(cause) is is_outside
