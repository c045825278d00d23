"""Two sides against each other: rows with tests, per-step series, shifts of quantiles. On saved summaries it needs no torch."""
