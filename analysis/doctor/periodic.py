"""Alignment: outliers that come back at a fixed distance, as one wrong token at the end of every shard of a split."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Ints
from rollout_is.analysis.doctor.state import MAGNITUDES, State, counts, places, quantile, table, tally
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, percent, plural, sig
from rollout_is.analysis.doctor.window import Window

OUTLIER = 1.0  # nats; below it is noise of a hard token
KEPT = 256  # outliers kept a unit
MIN_OUTLIERS = 4
MIN_PERIOD = 8
SHARE = 0.8  # of the outliers sit at one residue
FRAMES = ("shard", "pack", "segment")  # what positions are counted from


@dataclass
class Periodic(State):
    """Positions of outliers, counted from the start of the shard, of the pack and of the segment.

    Attributes:
        at: shard name -> int64 [m, 3] positions of outliers in the three FRAMES.
        seen: histogram of |d| of sampled tokens.
        dropped: outliers beyond KEPT a unit.
        at_edge: int64 [2] outliers; those of them at a first or last valid token (another fault, of another name).
    """

    at: dict[str, Any] = table()
    seen: Ints = counts(MAGNITUDES)
    dropped: Ints = counts(1)
    at_edge: Ints = counts(2)
    places: list[dict[str, Any]] = places()

    def look(self, window: Window) -> None:
        """Take in a sampled window: the histogram only."""
        self.seen += tally(window.magnitude)

    def outliers(self, window: Window, pack_offset: Ints) -> None:
        """Take in the outliers of any block; pack_offset int64 [k]: where each piece's pack starts."""
        index = np.flatnonzero(np.abs(window.d) > OUTLIER)
        if not len(index):
            return
        piece = np.searchsorted(window.starts, index, side="right") - 1
        where = window.where[index] + window.base
        edge = (index == window.starts[piece]) & window.begins[piece] | (
            index == window.stops[piece] - 1
        ) & window.ends[piece]
        self.at_edge += [len(index), int(np.count_nonzero(edge))]
        found = np.stack([where, where - pack_offset[piece], where - window.offset[piece]], axis=1)
        have = sum(len(x) for x in self.at.values())
        kept = found[: max(0, KEPT - have)]
        self.dropped[0] += len(found) - len(kept)
        if len(kept):
            old = self.at.get(window.shard.name)
            self.at[window.shard.name] = Rows(kept) if old is None else old + Rows(kept)
        for i in index[: 3 - len(self.places)]:
            self.places.append(window.place(int(i)))


class Rows:
    """Rows of int64 [m, 3] whose sum is concatenation."""

    def __init__(self, rows: Ints) -> None:
        self.rows = rows

    def __add__(self, other: Rows) -> Rows:
        return Rows(np.concatenate([self.rows, other.rows]))

    def __len__(self) -> int:
        return len(self.rows)


def period_of(groups: list[Ints]) -> tuple[int, int, float] | None:
    """(period, residue, share of outliers at it) that explains the positions best, or None.

    Args:
        groups: int64 arrays of outlier positions; differences are taken inside each.

    >>> period_of([np.arange(511, 4096, 512)])
    (512, 511, 1.0)
    >>> period_of([np.array([3, 50, 411, 700, 1523])]) is None
    True
    """
    gaps: Counter[int] = Counter()
    for positions in groups:
        ordered = np.unique(positions)
        gaps.update(np.diff(ordered).tolist())
        gaps.update((ordered[2:] - ordered[:-2]).tolist())
    everything = np.concatenate(groups)
    distinct = sum(len(np.unique(g)) for g in groups)
    best: tuple[int, int, float] | None = None
    for period, times in gaps.most_common(16):
        if period < MIN_PERIOD or times < 2:
            continue
        residues = np.bincount(everything % period, minlength=period)
        residue = int(residues.argmax())
        share = float(residues[residue]) / len(everything)
        hits = share * distinct
        # a residue of a long period catches a few outliers by chance; MIN_OUTLIERS hits at one of `period` residues do not
        if share >= SHARE and hits >= MIN_OUTLIERS and (best is None or share > best[2] or period > best[0]):
            best = (period, residue, share)
    return best


def judge(scene: Scene) -> list[Draft]:
    """``alignment.periodic``."""
    s = scene.pooled(Periodic)
    groups = [x.rows for x in s.at.values()]
    outliers = sum(len(g) for g in groups)
    n = int(s.seen.sum())
    if outliers < MIN_OUTLIERS or not n or int(s.at_edge[1]) > 0.5 * int(s.at_edge[0]):
        return []
    median = quantile(s.seen, 0.5)
    if median > OUTLIER / 10:  # then |d| > 1 is not an outlier
        return []
    for frame in (2, 1, 0):  # the segment first: what repeats inside it repeats in the shard only by chance
        columns = [g[:, frame] for g in groups]
        found = period_of(columns)
        if found is None or not _several(columns):
            continue
        period, residue, share = found
        largest = quantile(s.seen, 1.0)
        names = list(s.at)
        ranks = sorted({i.rank for _, i, _ in scene.parts if i.name in names and i.rank is not None})
        return [
            Draft(
                "alignment.periodic",
                "error",
                f"outliers periodic, period {period} — shard boundary? {percent(share)} of {plural(outliers, 'outlier')} sit at "
                f"positions congruent {residue} mod {period} of the {FRAMES[frame]} (median |d| {sig(median)}, outliers above "
                f"{sig(OUTLIER)})",
                share * period,
                "outliers at one residue over what chance would put there",
                Scope(tuple(ranks) if len(ranks) < len(scene.ranks) else ()),
                tokens=outliers + int(s.dropped[0]),
                token_share=outliers / max(n, outliers),
                places=s.places,
                alternatives=("a fixed chunk of the engine's prefill or of the loss", "a page of the key/value cache"),
                figures={"period": period, "residue": residue, "frame": FRAMES[frame], "largest_abs_d": largest},
                source="verl#6068, #6268: labels rolled after the sequence-parallel split",
                next="compare the period with the width of a sequence- or context-parallel slice; "
                "rollout-is explain alignment.periodic",
            )
        ]
    return []


def _several(columns: list[Ints]) -> bool:
    """Whether the outliers stand at more than one distinct position: else it is a place (first token), not a period."""
    return len(np.unique(np.concatenate(columns))) >= 3
