"""Two views of one summary side by side: what masking changes. The tokens overlap, so nothing is tested."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_is.analysis.compare.result import Comparison, Pair, Row
from rollout_is.analysis.compare.rows import HEADLINE, quantile_rows
from rollout_is.analysis.compare.runs import NothingComparable
from rollout_is.analysis.findings import shell_path
from rollout_is.analysis.summary import Statistic, Summary

WHY = "two views of the same tokens are not two samples"


def compare_views(
    summary: Summary, views: Sequence[str], paths: Sequence[str] = HEADLINE, label: str = "the summary"
) -> Comparison:
    """Compare every view with the first.

    Args:
        summary: holds all of them.
        views: two or more of ``unmasked``, ``padded``, ``masked``, ``corrected``.
        paths: statistics below the view.
        label: for messages.

    Raises:
        NothingComparable: a view is not in the summary, or no position is valid under the mask.
    """
    for view in views:
        if view not in summary.views:
            raise NothingComparable(
                label,
                f"expected the view {view!r}, found {', '.join(summary.views) or 'none'}",
                "the corrected view exists with a correction policy only" if view == "corrected" else "it was left out",
                f"--views {','.join(list(summary.views)[:2])}",
                code="compare-no-view",
            )
    if summary.coverage.get("valid_tokens") is not None and summary.comparable <= 0:
        none = not summary.coverage["valid_tokens"]
        raise NothingComparable(
            label,
            f"expected valid tokens{'' if none else ' with finite log-probs on both sides'}, found none",
            "the mask is 0 everywhere: there is nothing to compare the unmasked figures with"
            if none
            else "every valid token is NaN or infinite on one side",
            f"rollout-is {'inspect' if none else 'doctor'} {shell_path(summary)}",
            code="compare-empty-side",
        )
    first, others = views[0], views[1:]
    pairs = tuple(_pair(summary, first, other, paths) for other in others)
    moved = [sum(row.change not in (None, 0.0) for row in pair.rows) for pair in pairs]
    sentences = [
        f"{pair.b} against {pair.a}: {'the same figures' if not n else f'{n} of {len(pair.rows)} figures differ'}"
        for pair, n in zip(pairs, moved, strict=True)
    ]
    return Comparison("views", pairs, "; ".join(sentences))


def _pair(summary: Summary, a: str, b: str, paths: Sequence[str]) -> Pair:
    rows = []
    for path in paths:
        left, right = summary.get(f"{a}.{path}"), summary.get(f"{b}.{path}")
        if left is None and right is None:
            continue
        rows.append(
            _row(path, left or Statistic(None, 0, why=f"not in {a}"), right or Statistic(None, 0, why=f"not in {b}"))
        )
    return Pair(a, b, (), tuple(rows), (), quantile_rows(summary, summary, "token", a, b), (WHY,))


def _row(path: str, a: Statistic, b: Statistic) -> Row:
    change = None if a.value is None or b.value is None else b.value - a.value
    why = a.why if a.value is None else b.why if b.value is None else WHY
    return Row(path, a, b, change, None, why or WHY, "same" if change == 0.0 else "untested")
