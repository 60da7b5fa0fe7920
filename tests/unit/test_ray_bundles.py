"""Whether ranks fit in a placement group that their driver is in."""

import pytest

from runtime.cluster.ray_nodes import Wanted, check_bundles
from runtime.errors import ConfigError

pytestmark = pytest.mark.unit

CPU = {"CPU": 1.0}
GPU = {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("bundles", "wanted"),
    [([{"CPU": 0.1}, CPU, CPU], CPU), ([CPU, GPU, GPU, CPU], GPU), ([CPU, GPU, GPU], CPU)],
)
def test_ranks_fit(bundles: list[dict[str, float]], wanted: dict[str, float]) -> None:
    check_bundles(bundles, Wanted(wanted, 2, "PACK"))


@pytest.mark.parametrize(
    ("bundles", "wanted"), [([CPU], CPU), ([CPU, CPU], CPU), ([GPU, CPU, GPU], GPU)]
)
def test_ranks_do_not_fit(bundles: list[dict[str, float]], wanted: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="it must have 2, one for each of tp=2 ranks"):
        check_bundles(bundles, Wanted(wanted, 2, "PACK"))
