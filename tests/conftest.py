"""Put the tests' own helpers (``oracle``, ``made``) on the path: nothing of the repository's rooms becomes importable by it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(params=["numpy", "fused-plain", "fused-avx2", "fused-avx512"])
def each_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What sums blocks, one after another: every kernel that this install and this processor have."""
    from rollout_is.analysis.fused import library

    name = str(request.param)
    if name not in library.names():
        pytest.skip(f"no kernel {name} here: there is {', '.join(library.names())}")
    monkeypatch.setenv(library.VARIABLE, name)
    return name
