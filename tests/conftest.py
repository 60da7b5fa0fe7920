"""What holds for tests of every tier."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# transformers has torch make this folder, and torch's own choice is the temporary folder, where
# the tests would leave it. Tests of our own processes take the variable away again.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path("~/.cache/lockstep/torchinductor").expanduser())
)


# A busy machine draws and runs examples slowly: that is no fault.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=30)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Fewer drawn examples where `full` is left out; triton's kernels are interpreted.

    Not so for tests that are asked for by the folder gpu. Triton looks at the variable when it is
    first imported, which transformers does.
    """
    if "not full" in config.option.markexpr:
        settings.load_profile("quick")
    if not any("gpu" in Path(argument).parts for argument in config.args):
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def torch_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear and decoder layers are torch's, as on processors that our kernels don't know."""
    monkeypatch.setattr("workers.layers.linear_methods.linear_kernel", lambda _: None)
    monkeypatch.setattr("workers.models.lean_layers.decoder_kernels", lambda _: None)
