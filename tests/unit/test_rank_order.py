"""Which of the actors that Ray placed becomes which rank."""

import random

import pytest

from runtime.cluster.ray_launcher import rank_order
from workers.actor import ActorAddress

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "devices",
    [
        {"here": range(8)},
        {"here": range(4), "b": range(4)},
        {"b": range(4), "here": range(4), "c": range(8)},
        {"here": [2], "b": [5, 0, 7], "c": [1, 3]},
        {"b": range(3), "c": [6]},
    ],
    ids=["1x8", "2x4", "2x4 and 1x8", "uneven", "a head without devices"],
)
def test_ranks_go_node_by_node_and_by_device(devices: dict[str, list[int]]) -> None:
    """The driver's node is first, whatever order the actors came in."""
    found = [
        ActorAddress(node=node, cuda_device=device, host=node, port=1)
        for node, indices in devices.items()
        for device in indices
    ]
    random.Random(1).shuffle(found)

    ranks = [found[index] for index in rank_order(found, "here")]

    nodes = sorted(devices, key=lambda node: (node != "here", node))
    assert [(rank.node, rank.cuda_device) for rank in ranks] == [
        (node, device) for node in nodes for device in sorted(devices[node])
    ]
