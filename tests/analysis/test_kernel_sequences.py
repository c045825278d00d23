"""The compiled pass over sequences: each figure against extended precision, with empty segments, groups and shifts; what it leaves to numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from made import randomly, stable

from rollout_is.analysis import clusters, weights
from rollout_is.analysis import populations as sums
from rollout_is.analysis.engine import Engine
from rollout_is.analysis.fused import library
from rollout_is.analysis.fused.figures import Figures
from rollout_is.analysis.histogram import Histogram
from rollout_is.analysis.nonfinite import Nonfinite
from rollout_is.analysis.populations import Bounds, Half, Scaled, Table, Whole
from rollout_is.analysis.rows import SEQUENCE_ERRORS, TOKEN_ERRORS, Population, Row, SequenceFacts, sequence_row

BOUNDS = Bounds(math.log(0.9), math.log(1.1), -0.5, None)
TAIL = 40
TOKEN_ROWS = (sums.D, None, sums.K3, sums.ABS, sums.DP, sums.MULT, sums.W, sums.W2, sums.HIGH, sums.LOW, sums.EXTREME, sums.VETO,
              sums.IDENTICAL)  # fmt: skip


@pytest.fixture(params=library.ORDER[1:])
def compiled(request: pytest.FixtureRequest) -> library.Compiled:
    """Each compiled kernel by itself."""
    if request.param not in library.names():
        pytest.skip(f"no kernel {request.param} here: there is {', '.join(library.names())}")
    with library.only(request.param):
        found = library.kernel()[1]
    assert found is not None
    return found


def table_of(size: int, seed: int, shift: float = 0.0, spread: float = 0.02) -> Table:
    """Sums as sequences of 1 to 60 tokens have them; a tenth of the segments are empty."""
    rng = np.random.default_rng(seed)
    n = np.where(rng.random(size) < 0.1, 0, rng.integers(1, 60, size)).astype(np.float64)
    t = np.abs(rng.normal(size=(sums.COLUMNS, size))) * np.where(n > 0, np.sqrt(n), 0)
    mean = shift + spread * rng.normal(size=size)
    t[sums.N], t[sums.D], t[sums.T] = n, n * mean, -n * rng.uniform(0.1, 3, size)
    t[sums.D2] = n * (0.1 + (mean - shift) ** 2)
    t[sums.E] = n * (np.expm1(mean) - math.expm1(shift))
    t[sums.W] = n * math.exp(shift) + t[sums.E]
    t[sums.VETO] = (n > 0) & (rng.random(size) < 0.2)
    low, high = np.where(n > 0, mean - 0.3, math.inf), np.where(n > 0, mean + 0.3, -math.inf)
    return Table(np.arange(size), t, low, high)


def row_of(
    compiled: library.Compiled, table: Table, *, shift: float = 0.0, groups: Any = None, mismatch: bool = True
) -> Row | None:
    figures = Figures(compiled.sequences, BOUNDS, mismatch, TAIL)
    none = Scaled(), Scaled(), Scaled()
    half = Half(BOUNDS, shift, math.expm1(shift), mismatch, int(table.sums[sums.N].sum()), Whole(), *none)
    return figures.row(Population([half]), table, SequenceFacts.of([Nonfinite(len(table.sequence))], groups))


def near(got: float, want: Any, beside: Any = 0.0) -> None:
    assert abs(np.longdouble(got) - want) <= 4e-14 * max(abs(want), beside), (got, float(want))


@pytest.mark.parametrize("size", [1, 2, 7, 255, 256, 257, 5000])
@pytest.mark.parametrize(("shift", "mismatch"), [(0.0, True), (0.0, False), (1.25, True)])
def test_every_figure(compiled: library.Compiled, size: int, shift: float, mismatch: bool) -> None:
    table = table_of(size, size, shift)
    got = row_of(compiled, table, shift=shift, mismatch=mismatch)
    assert got is not None and got.token is not None and got.sequence is not None
    token, sequence = got.token, got.sequence
    some = table.sums[sums.N] > 0
    t = table.sums[:, some].astype(np.longdouble)
    n, count = t[sums.N], int(some.sum())
    assert (token.n, sequence.measured, sequence.sequences) == (int(n.sum()), count, count)
    assert sequence.vetoed == int((t[sums.VETO] > 0).sum())
    near(token.sums["abs"], t[sums.ABS].sum())
    near(token.sums["k3"], t[sums.K3].sum())
    if not count:
        assert sequence.product.n == 0 and sequence.pareto is None and sequence.clusters is None
        return
    assert (token.weights.low, token.weights.high) == (float(table.low.min()), float(table.high.max()))
    d, x = t[sums.D], t[sums.E] / n + np.expm1(np.longdouble(shift)) + 1
    nll, rollout_nll = -t[sums.T] / n, (d - t[sums.T]) / n
    levels = [(sequence.x, np.log(x), 1e-12), (sequence.product, d, 0.0), (sequence.geometric, d / n, 0.0)]
    if mismatch:
        levels += [(sequence.train, nll, 0.0), (sequence.rollout, rollout_nll, 0.0), (sequence.ratio, -d / n, 0.0)]
    else:
        assert sequence.train.n == sequence.rollout.n == sequence.ratio.n == 0
    for level, log, rounding in levels:
        w, less = np.exp(log), np.expm1(log)
        ((scale, first, second),), (moments,) = level.parts, level.moments
        assert (level.n, scale, moments.scale, moments.n) == (count, 0.0, 0.0, count)
        near(first, w.sum())
        near(second, (w * w).sum())
        near(moments.mean, less.mean(), float(np.abs(less).mean()))
        near(moments.m2, ((less - less.mean()) ** 2).sum(), 1e-12 * float((less**2).sum()))
        assert level.low == pytest.approx(float(log.min()), rel=1e-15, abs=rounding)
        assert level.high == pytest.approx(float(log.max()), rel=1e-15, abs=rounding)
        assert (level.above, level.below) == (int((log > BOUNDS.log_upper).sum()), int((log < BOUNDS.log_lower).sum()))
    assert sequence.x_deviation == pytest.approx(float(np.abs(x - 1).max()), rel=1e-14)
    assert sequence.x_counts == (sequence.x.above, sequence.x.below)
    for level, log in ((sequence.product, d), (sequence.geometric, d / n)):
        want = Histogram.of_values(log.astype(np.float64))
        assert np.array_equal(level.histogram.keys, want.keys) and np.array_equal(level.histogram.counts, want.counts)
    assert sequence.pareto is not None
    assert np.array_equal(sequence.pareto.values, np.sort(d.astype(np.float64))[::-1][:TAIL])
    near(sequence.train_nll, nll.sum())
    near(sequence.rollout_nll, rollout_nll.sum())
    near(sequence.diff, -(d / n).sum(), float(np.abs(d / n).sum()))
    near(sequence.abs_diff, np.abs(d / n).sum())
    check_errors(token.clusters, sequence.clusters, *figures_of(t, shift, mismatch), n)


def figures_of(t: Any, shift: float, mismatch: bool) -> tuple[list[Any], list[Any]]:
    """What has a clustered error, of each sequence: sums over tokens, and figures of the sequence."""
    n, d = t[sums.N], t[sums.D]
    d2 = t[sums.D2] + 2 * shift * (d - n * shift) + n * shift * shift
    tokens = [d2 if column is None else t[column] for column in TOKEN_ROWS]
    nll, rollout_nll, drift = -t[sums.T] / n, (d - t[sums.T]) / n, -d / n
    ppl = [np.exp(y) if mismatch else y for y in (nll, rollout_nll, drift)]
    x = t[sums.E] / n + np.expm1(np.longdouble(shift)) + 1
    return tokens, [x, np.exp(d), np.exp(d / n), nll, rollout_nll, ppl[0], ppl[1], drift, np.abs(drift), ppl[2]]


def check_errors(token: Any, sequence: Any, tokens: list[Any], figures: list[Any], n: Any) -> None:
    """sqrt(G / (G - 1) sum (S - mean n)^2) / N, whatever centre the residuals were kept about."""
    for rows, quantities, names, size in (
        (token, tokens, TOKEN_ERRORS, n),
        (sequence, figures, SEQUENCE_ERRORS, np.ones(len(n))),
    ):
        assert len(quantities) == len(names)
        for q, (name, own) in enumerate(zip(names, quantities, strict=True)):
            total, g = size.sum(), len(size)
            mean = own.sum() / total
            got = clusters.standard_error([rows], q, float(mean), float(total))
            if g < 2:
                assert got is None
                continue
            want = math.sqrt(g / (g - 1) * float(((own - mean * size) ** 2).sum())) / float(total)
            assert got == pytest.approx(want, rel=1e-11, abs=1e-15 * float(np.abs(own).max())), name


@pytest.mark.parametrize("size", [5, 700])
def test_groups_are_summed(compiled: library.Compiled, size: int) -> None:
    table = table_of(size, 3)
    groups = np.random.default_rng(1).integers(-3, 9, size) * 1000
    got, plain = row_of(compiled, table, groups=groups), row_of(compiled, table)
    assert got is not None and plain is not None and got.sequence is not None and plain.sequence is not None
    assert got.token is not None and isinstance(got.token.clusters, clusters.GroupTable)
    assert isinstance(got.sequence.clusters, clusters.GroupTable)
    assert got.sequence.product.parts == plain.sequence.product.parts
    assert got.sequence.x.moments == plain.sequence.x.moments
    some = table.sums[sums.N] > 0
    tokens, figures = figures_of(table.sums[:, some], 0.0, True)
    for own, quantities, sizes in (
        (got.token.clusters, tokens, table.sums[sums.N, some]),
        (got.sequence.clusters, figures, np.ones(int(some.sum()))),
    ):
        want = clusters.fold_groups(groups[some], [q.astype(np.float64) for q in quantities], sizes)
        assert np.array_equal(own.ids, want.ids) and np.array_equal(own.n, want.n)
        assert np.allclose(own.sums, want.sums, rtol=1e-13, atol=0)


@pytest.mark.parametrize("size", [6, 6000])
def test_exact_zeros_stand_apart(compiled: library.Compiled, size: int) -> None:
    table = table_of(size, 0)
    table.sums[sums.N] = 4
    table.sums[sums.D] = np.resize([0.0, -0.0, 1e-60, -1e-60, 0.5, -0.0], size)
    table.sums[sums.E], table.sums[sums.W], table.sums[sums.T] = 0.0, 4.0, -1.0
    got = row_of(compiled, table)
    assert got is not None and got.sequence is not None
    for level in (got.sequence.product, got.sequence.geometric):
        values = table.sums[sums.D] if level is got.sequence.product else table.sums[sums.D] / 4
        want = Histogram.of_values(values)
        assert np.array_equal(level.histogram.keys, want.keys) and np.array_equal(level.histogram.counts, want.counts)


@pytest.mark.parametrize(
    ("row", "value"),
    [(sums.W, 1e-9), (sums.T, -6e4), (sums.T, 1e4), (sums.D, math.nan), (sums.E, math.inf)],
)
def test_what_needs_a_scale_is_left_to_numpy(compiled: library.Compiled, row: int, value: float) -> None:
    table = table_of(300, 4)
    table.sums[row] = np.where(table.sums[sums.N] > 0, value, 0)
    assert row_of(compiled, table) is None


@pytest.mark.parametrize("value", [-5.0, -400.0, 250.0, 350.0, 800.0])
def test_product_weights_far_from_1_keep_their_scale(compiled: library.Compiled, value: float) -> None:
    """As of tokens that are masked out with no log-prob of the rollout: every sequence's product far below 1."""
    table = table_of(600, 6)
    n = table.sums[sums.N]
    table.sums[sums.D] = np.where(n > 0, value + 0.1 * np.arange(600) / 600, 0)
    table.sums[sums.N] = np.where(n > 0, 500, 0)
    table.sums[sums.E] = table.sums[sums.N] * np.expm1(table.sums[sums.D] / 500)
    table.sums[sums.W] = table.sums[sums.N] + table.sums[sums.E]
    table.sums[sums.T] = -table.sums[sums.N]
    got = row_of(compiled, table)
    assert got is not None and got.sequence is not None and got.sequence.clusters is not None
    log = table.sums[sums.D, n > 0]
    want = weights.row_of(log, BOUNDS.log_lower, BOUNDS.log_upper)
    own = got.sequence.product
    assert (own.parts, own.moments) == (want.parts, want.moments) or value == 250.0
    near(weights.log_sums(own)[0], np.longdouble(weights.log_sums(want)[0]))
    assert (own.low, own.high, own.above, own.below) == (want.low, want.high, want.above, want.below)
    index = SEQUENCE_ERRORS.index("product")
    with np.errstate(over="ignore", invalid="ignore"):
        one = clusters.row_of([np.exp(log)], np.ones(len(log)))
        mean = float(np.exp(log).mean())
    error = clusters.standard_error([got.sequence.clusters], index, mean, len(log))
    expected = clusters.standard_error([one], 0, mean, len(log))
    assert (error is None) == (expected is None)
    if error is not None:
        assert error == pytest.approx(expected, rel=1e-9)


def test_one_sequence_far_below_is_no_reason(compiled: library.Compiled) -> None:
    """A weight below float64 beside others near 1 is 0, as the sums have it."""
    table = table_of(300, 5)
    at = int(np.flatnonzero(table.sums[sums.N] > 10)[3])
    table.sums[sums.D, at] = -2000.0
    got = row_of(compiled, table)
    assert got is not None and got.sequence is not None
    assert got.sequence.product.low == -2000.0
    some = table.sums[sums.N] > 0
    near(got.sequence.product.parts[0][1], np.exp(table.sums[sums.D, some].astype(np.longdouble)).sum())


def test_a_dump_has_the_figures_that_numpy_has(compiled: library.Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sums of tokens, gone through by numpy: equal but for the last digits."""
    one = randomly(np.random.default_rng(7), segments=60)
    before = one.summarize()
    original = Engine.__init__

    def without(self: Engine, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self.figures = None

    monkeypatch.setattr(Engine, "__init__", without)
    after = one.summarize()
    stable(after)
    for view, sections in before.views.items():
        for section, statistics in sections.items():
            for name, own in statistics.items():
                other = after.views[view][section][name]
                assert (own.n, own.why) == (other.n, other.why), name
                for a, b in ((own.value, other.value), (own.stderr, other.stderr), (own.log_value, other.log_value)):
                    assert (a is None) == (b is None), name
                    if a is not None and b is not None:
                        assert a == pytest.approx(b, rel=1e-11, abs=1e-13), name


def test_zeros_are_told_apart_level_by_level(compiled: library.Compiled) -> None:
    """A product above 0 whose mean over the tokens underflows to it."""
    table = table_of(5000, 8)
    some = np.flatnonzero(table.sums[sums.N] > 1)[:5]
    table.sums[sums.D, some] = 5e-324
    got = row_of(compiled, table)
    assert got is not None and got.sequence is not None
    n = table.sums[sums.N]
    d, n = table.sums[sums.D, n > 0], n[n > 0]
    for level, log in ((got.sequence.product, d), (got.sequence.geometric, d / n)):
        want = Histogram.of_values(log)
        assert np.array_equal(level.histogram.keys, want.keys) and np.array_equal(level.histogram.counts, want.counts)


def test_numpy_counts_small_means_as_the_kernels_do(compiled: library.Compiled) -> None:
    """A mean weight of 1e-17 is above a bound of 1e-20: 1 + (x - 1) would be 0, and below it."""
    bounds = Bounds(math.log(1e-20), math.log(2.0), None, None)
    table = table_of(40, 9)
    n = table.sums[sums.N]
    at = int(np.flatnonzero(n > 0)[0])
    table.sums[sums.E, at] = -n[at]
    table.sums[sums.W, at] = n[at] * 1e-17
    facts = SequenceFacts.of([Nonfinite(40)], None)
    none = Scaled().arrays()
    by_numpy = sequence_row(table.take(n > 0), facts.take(n > 0), none, bounds, 0.0, True, TAIL)
    half = Half(bounds, 0.0, 0.0, True, int(n.sum()), Whole(), Scaled(), Scaled(), Scaled())
    own = Figures(compiled.sequences, bounds, True, TAIL).row(Population([half]), table, facts)
    assert own is not None and own.sequence is not None
    assert own.sequence.x_counts == by_numpy.x_counts == (0, 0)
