"""What holds for tests of every tier."""

import os
from pathlib import Path

# transformers has torch make this folder, and torch's own choice is the temporary folder, where
# the tests would leave it. Tests of our own processes take the variable away again.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path("~/.cache/lockstep/torchinductor").expanduser())
)
