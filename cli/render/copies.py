"""The masked figures as stored and without exact copies of sequences, side by side."""

from __future__ import annotations

from rollout_is.analysis.summary import Statistic, Summary
from rollout_is.cli.render.footnotes import Footnotes
from rollout_is.cli.render.numbers import count
from rollout_is.cli.render.table import Column, Table, cell

_SHOWN = (
    ("token", "rollout_is_mean"),
    ("token", "rollout_is_eff_sample_size"),
    ("per_sequence", "rollout_is_seq_mean"),
    ("mismatch", "mismatch_kl"),
    ("mismatch", "mismatch_k3_kl"),
    ("mismatch", "mismatch_logprob_abs_diff"),
    ("mismatch", "mismatch_log_ppl_abs_diff"),
)


def copies_table(summary: Summary, notes: Footnotes) -> Table | None:
    """None when the dump holds no copies."""
    without = summary.extra.get("without_duplicates")
    if not without:
        return None
    masked = without["views"]["masked"]
    rows = []
    for section, name in _SHOWN:
        stored = summary.get(f"masked.{section}.{name}")
        data = masked.get(section, {}).get(name)
        if stored is not None and data is not None:
            plain = Statistic.from_dict(data)
            rows.append((cell(name), notes.statistic(stored), notes.statistic(plain)))
    columns = (Column("statistic", "left"), Column("as stored"), Column("without copies"))
    n = without["sequences_left_out"]
    return Table(f"without {count(n)} exact cop{'y' if n == 1 else 'ies'} of sequences, masked", columns, tuple(rows))
