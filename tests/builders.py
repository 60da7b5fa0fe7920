"""What tests of several tiers build alike."""

import pytest

from runtime.errors import ConfigError
from runtime.model_files import resolve_model


def demo_model_folder() -> str:
    """The embedded model's folder in the cache, converted on first use; skips without the extra."""
    try:
        return resolve_model("demo", print)
    except ConfigError as error:
        if "isn't installed" not in str(error):
            raise
        pytest.skip(str(error))
