"""The compiled kernel on its own: accuracy of its exponentials, its bins, its reading of stored types, what it leaves to numpy.

That the figures agree with the oracle whichever kernel runs is shown where the oracle is: test_random_dumps, test_small_units.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made import analyze, randomly, stable, write_dump

from rollout_is.analysis import populations as sums
from rollout_is.analysis.fused import library
from rollout_is.analysis.fused.call import Fused
from rollout_is.analysis.ops import CpuOps
from rollout_is.analysis.populations import Bounds
from rollout_is.analysis.select import Picker, Stored
from rollout_is.analysis.split import Runs
from rollout_is.analysis.sums import LOG_COLD, Sums
from rollout_is.dumps.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = Bounds(math.log(0.5), math.log(2.0), None, None)


@pytest.fixture(params=library.ORDER[1:])
def fused(request: pytest.FixtureRequest) -> Fused:
    """Each compiled kernel by itself."""
    if request.param not in library.names():
        pytest.skip(f"no kernel {request.param} here: there is {', '.join(library.names())}")
    with library.only(request.param):
        name, compiled = library.kernel()
    assert name == request.param and compiled is not None
    return Fused(compiled.block, BOUNDS)


def summed(
    fused: Fused, train: torch.Tensor, rollout: torch.Tensor, starts: list[int] | None = None, shift: float = 0.0
) -> tuple[Sums, Any] | None:
    """All tokens as one block; by default each token is a piece."""
    n = len(train)
    at = np.arange(n) if starts is None else np.array(starts)
    into = Sums(BOUNDS, shift, True, moments=True)
    stored = Stored(Picker(), Runs(np.ones(n, dtype=bool)).pick(0, n), train, rollout)
    assert fused.handles(stored)
    return (into, into.table().sums) if fused.add(into, stored, 0, n, at, np.arange(len(at)), checksums=True) else None


def test_the_compiler_of_this_machine_was_used() -> None:
    """A checkout is installed in place: where there is a compiler, the kernel is there too."""
    if sys.platform == "win32" or not any(shutil.which(c) for c in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler on PATH: numpy does the work")
    assert library.names()[1:], "make install compiles analysis/fused; was it changed since?"


def test_exponentials_to_a_unit_in_the_last_place(fused: Fused) -> None:
    """w = exp(d) and e = exp(d) - 1 of single tokens against extended precision, from denormal gaps to the largest handled."""
    rng = np.random.default_rng(0)
    d = np.concatenate(
        [
            rng.uniform(-299, 299, 4000), rng.normal(size=4000), rng.normal(size=4000) * 1e-3, rng.normal(size=2000) * 1e-9,
            10.0 ** rng.uniform(-300, 0, 1000), np.array([0.0, math.log(2) / 2, -math.log(2) / 2, math.log(2), 5e-324]),
        ]
    )  # fmt: skip
    rollout = np.zeros(len(d))
    got = summed(fused, torch.from_numpy(d), torch.from_numpy(rollout))
    assert got is not None
    table = got[1]
    long = d.astype(np.longdouble)
    for row, want in ((sums.W, np.exp(long)), (sums.E, np.expm1(long)), (sums.MULT, np.exp(np.abs(long)))):
        error = np.abs(table[row] - want)
        # Sums of w are put together from those of w - 1 unless nearly all weight is gone.
        beside = np.where((row == sums.W) & (d < 0) & (d > LOG_COLD), 1.0, np.abs(want.astype(np.float64)))
        spacing = np.spacing(beside)
        assert float((error / spacing).max()) < 2.0


def test_probabilities_of_any_log_prob(fused: Fused) -> None:
    rollout = np.array([-1e-12, -0.5, -30.0, -700.0, -707.9, -709.0, -745.0, -9999.0, -1e10, 0.0, 1.0])
    got = summed(fused, torch.from_numpy(rollout + 0.25), torch.from_numpy(rollout))
    assert got is not None
    want = np.exp(rollout.astype(np.longdouble)) * np.expm1(np.longdouble(0.25))
    assert np.abs(got[1][sums.DP] - want).max() < 4e-16
    assert got[1][sums.DP][rollout < -709].max() == 0.0


def test_the_histogram_is_the_conversion_to_half(fused: Fused) -> None:
    """Ties, subnormal halves, the end of the range: the same bins as numpy's path, token by token."""
    halves = np.arange(0, 0x5C80, dtype=np.uint16).view(np.float16).astype(np.float64)  # up to 300
    halves = halves[halves < 300]
    between = (halves[1:] + halves[:-1]) / 2
    near = np.concatenate([halves, between, np.nextafter(between, 0), np.nextafter(between, 400)])
    d = np.concatenate([near, -near, np.array([-0.0, 1e-40, -1e-40])])
    d = d[np.abs(d) <= 300]
    got = summed(fused, torch.from_numpy(d), torch.zeros(len(d), dtype=torch.float64), [0])
    assert got is not None
    ops = CpuOps(len(d))
    assert np.array_equal(got[0].whole.bins, ops.half_histogram(d))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_value_of_a_stored_type_is_read_as_torch_reads_it(fused: Fused, dtype: torch.dtype) -> None:
    if dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
        stored = bits.view(dtype)
    else:
        stored = torch.from_numpy(-np.random.default_rng(1).exponential(5, 3000)).to(dtype)
    exact = stored.to(torch.float64)
    fine = torch.isfinite(exact) & (exact <= 300) & (exact >= -300)
    stored, exact = stored[fine], exact[fine]
    got = summed(fused, stored, torch.zeros(len(stored), dtype=torch.float32))
    assert got is not None
    assert np.array_equal(got[1][sums.T], exact.numpy())
    assert np.array_equal(got[1][sums.D], exact.numpy())


def test_what_it_does_not_handle_is_left_alone(fused: Fused) -> None:
    for train, rollout in (
        (float("nan"), -1.0), (-1.0, float("nan")), (float("inf"), float("inf")), (-1.0, float("-inf")), (-1.0, -302.0),
        (-302.0, -1.0), (701.0, 700.5), (float("-inf"), float("-inf")),
    ):  # fmt: skip
        t, r = torch.full((100,), -1.0), torch.full((100,), -1.5)
        t[57], r[57] = train, rollout
        assert summed(fused, t, r, [0, 50]) is None
    into = Sums(BOUNDS, 0.0, True)
    stored = Stored(Picker(), Runs(np.ones(100, dtype=bool)).pick(0, 100), t, r)
    assert fused.add(into, stored, 0, 100, np.array([0]), np.array([0]), checksums=True) is None
    assert into.tokens == 0 and not into.whole.bins.any() and into.table().sums.shape[1] == 0


def test_tokens_of_many_runs_and_pieces(fused: Fused) -> None:
    """Runs that end inside pieces and pieces that end inside runs; a block that starts inside a run."""
    rng = np.random.default_rng(2)
    for density in (0.03, 0.5, 0.97):
        n = 3000
        on = rng.random(n) < density
        r = torch.from_numpy(-rng.exponential(1, n)).to(torch.float32)
        t = r + torch.from_numpy(0.1 * rng.normal(size=n)).to(torch.float32)
        picks = Runs(on).pick(0, n)
        stored = Stored(Picker(), picks, t, r)
        first, last = picks.count // 5, picks.count - 3
        starts = np.unique(np.concatenate([[0], rng.integers(0, last - first, 9)]))
        into = Sums(BOUNDS, 0.0, True)
        done = fused.add(into, stored, first, last, starts, np.arange(len(starts)), checksums=True)
        assert done is not None
        d = (t.double() - r.double()).numpy()[np.flatnonzero(on)[first:last]]
        table = into.table().sums
        assert np.array_equal(table[sums.N], np.diff(np.append(starts, last - first)))
        assert np.allclose(table[sums.D], np.add.reduceat(d, starts), rtol=1e-13, atol=1e-14)
        bits = [x.view(torch.int32).numpy()[np.flatnonzero(on)[first:last]] for x in (t, r)]
        want = np.add.reduceat(bits[0], starts, dtype=np.int32) * np.int32(-1640531527)
        want += np.add.reduceat(bits[1], starts, dtype=np.int32)
        assert np.array_equal(done[1].astype(np.int32), want)


@pytest.mark.parametrize("density", [0.05, 0.5, 0.98])
def test_a_few_positions_by_rank(density: float) -> None:
    on = np.random.default_rng(4).random(500) < density
    on[:3] = on[-2:] = True
    picks = Runs(on).pick(1, 499)
    for first, last in ((0, 0), (0, 1), (1, picks.count), (picks.count // 2, picks.count // 2 + 7), (0, picks.count)):
        assert np.array_equal(picks.some(first, min(last, picks.count)), picks.positions[first:last])


def test_kernels_agree_to_the_last_digits(tmp_path: Path, each_kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    path = write_dump(tmp_path, [randomly(rng, segments=40, length=300, tail=5) for _ in range(3)], ranks=3)
    own = analyze(path, workers=1)
    assert own.runtime["kernel"] == each_kernel
    assert stable(own) == stable(analyze(path, workers=3))
    monkeypatch.setenv(library.VARIABLE, "numpy")
    other = analyze(path, workers=1)
    for name, statistic in own.views["masked"]["mismatch"].items():
        if statistic.value is not None:
            assert statistic.value == pytest.approx(other.views["masked"]["mismatch"][name].value, rel=1e-10, abs=1e-15)


def fields_of(header: str, name: str) -> list[str]:
    """The fields of a structure of a header, in order."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "analysis" / "fused" / header).read_text(), flags=re.DOTALL)
    found = re.search(rf"struct {name} \{{(.*?)\}};", text, flags=re.DOTALL)
    assert found is not None
    fields = [
        re.sub(r"\[\w+\]", "", word).strip(" *\n")
        for line in found[1].split(";")
        for word in re.sub(r"^\s*(const |struct )*\w+ ", "", line).split(",")
    ]
    return [field for field in fields if field]


def test_rows_and_fields_are_those_of_the_headers() -> None:
    named = re.search(r"enum row \{([^}]*)\}", (ROOT / "analysis" / "fused" / "block.h").read_text())
    assert named is not None
    rows = [name.strip() for name in named[1].split(",")]
    assert [getattr(sums, name) for name in rows] == list(range(len(rows)))
    for header, name, own in (
        ("block.h", "side", library.Side),
        ("block.h", "block", library.Block),
        ("sequences.h", "weights", library.Level),
        ("sequences.h", "sequences", library.Sequences),
    ):
        assert fields_of(header, name) == [field for field, *_ in own._fields_]


def test_an_unknown_kernel_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "fused-abacus")
    with pytest.raises(UsageError) as caught:
        library.kernel()
    assert "expected one of numpy" in str(caught.value)


def test_no_library_and_a_foreign_one_mean_numpy(tmp_path: Path) -> None:
    assert [name for name, _ in library._load(tmp_path / "none.so")] == ["numpy"]
    (tmp_path / "text.so").write_text("not a library")
    assert [name for name, _ in library._load(tmp_path / "text.so")] == ["numpy"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on PATH")
@pytest.mark.parametrize("layout", [1, ctypes.sizeof(library.Block) + ctypes.sizeof(library.Sequences)])
def test_a_library_of_another_version_means_numpy(tmp_path: Path, layout: int) -> None:
    """Rows in another order need no other size: what counts is that it was made from these sources."""
    source = tmp_path / "other.c"
    levels = "".join(
        f"int rollout_is_{part}_{name.removeprefix('fused-')}(void *b) {{ return 0; }}\n"
        for name in library.ORDER[1:]
        for part in ("block", "sequences")
    )
    source.write_text(
        f"int rollout_is_layout(void) {{ return {layout}; }}\n{levels}"
        'int rollout_is_level(void) { return 1; }\nconst char *rollout_is_sources(void) { return "of another day"; }\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "other.so")], check=True)
    assert [name for name, _ in library._load(tmp_path / "other.so")] == ["numpy"]


def test_ranks_take_the_slowest_of_their_kernels() -> None:
    assert library.common(["fused-avx512", "numpy", "fused-avx2"]) == "numpy"
    with library.only("numpy"):
        assert library.kernel() == ("numpy", None)
