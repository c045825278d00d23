"""Put the tests' own helpers (``oracle``, ``made``) on the path: nothing of the repository's rooms becomes importable by it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure() -> None:
    """Shapes and dtypes between the engine's parts are checked while the tests run."""
    import shapes

    shapes.install()
