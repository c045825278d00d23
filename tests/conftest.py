"""Put the tests' own helpers (``oracle``, ``made``) on the path: nothing of the repository's rooms becomes importable by it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure() -> None:
    """Shapes and dtypes between the engine's parts are checked while the tests run."""
    for name in (
        "COLUMNS",
        "LINES",
        "NO_COLOR",
        "FORCE_COLOR",
    ):  # xdist gives its workers 80 columns; screens are for 100
        os.environ.pop(name, None)
    import shapes

    shapes.install()
