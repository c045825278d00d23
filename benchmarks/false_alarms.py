"""How often ``compare`` calls a change between two halves of one healthy run, over random splits by group.

    python benchmarks/false_alarms.py [DUMP ...] [--splits 400] [--seed 0]

Every split puts each group (``group_ids`` where dumped, else each sequence) on one of two sides of equal size, analyses both
and compares them as ``rollout-is compare`` does. Nothing differs, so every change that is called is a false alarm. What is
claimed: with level 0.05, at most 5 % of the comparisons call anything at all (Holm over the tested rows), and a single row
alone, uncorrected, has p < 0.05 in 5 % of the splits. The same halves also tell how often ``check`` fails with the default
limits when one half is the baseline of the other. Without DUMP: sample_dumps/tiny_lm and two made runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from rollout_is.analysis.batch import Consumer
from rollout_is.analysis.compare.paired import join, paired_tests
from rollout_is.analysis.compare.rows import HEADLINE
from rollout_is.analysis.compare.runs import Side, compare_runs
from rollout_is.analysis.compare.sequences import SequenceConsumer
from rollout_is.analysis.compare.steps import is_real
from rollout_is.analysis.compare.tails import incomplete_beta
from rollout_is.analysis.gate.baseline import baseline_limits
from rollout_is.analysis.gate.evaluate import evaluate
from rollout_is.analysis.pipeline import summarize
from rollout_is.analysis.settings import Settings

ALPHA = 0.05


@dataclass
class Run:
    """One healthy run in memory, its sequences apart: train, rollout and mask of each, and its group."""

    name: str
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    groups: NDArray[np.int64]


def read(folder: Path) -> Run:
    """All sequences of a dump that hold a valid token."""
    sequences, groups = [], []
    for path in sorted(folder.rglob("*.safetensors")):
        tensors = load_file(path)
        bounds = tensors["cu_seqlens"].tolist()
        for segment, (start, stop) in enumerate(pairwise(bounds)):
            piece = tuple(tensors[name][start:stop] for name in ("train_logprobs", "rollout_logprobs", "response_mask"))
            if piece[2].any():
                sequences.append(piece)
                groups.append(int(tensors["group_ids"][segment]) if "group_ids" in tensors else len(groups))
    return Run(folder.name, sequences, np.unique(groups, return_inverse=True)[1])


def made(name: str, groups: int, members: int, seed: int) -> Run:
    """A run whose groups differ: each has its own noise scale (log-normal), shared by its members, and Student tails (4 df)."""
    rng = np.random.default_rng(seed)
    sequences, ids = [], []
    for group in range(groups):
        scale = 0.01 * math.exp(rng.normal(0.0, 0.5))
        for _ in range(members):
            n = int(rng.integers(40, 400))
            train = -rng.exponential(1.0, n)
            d = scale * rng.standard_t(4, n)
            sequences.append((torch.tensor(train), torch.tensor(train - d), torch.ones(n, dtype=torch.bool)))
            ids.append(group)
    return Run(name, sequences, np.array(ids))


def half(run: Run, chosen: NDArray[np.bool_], consumers: Sequence[Consumer] = ()) -> Side:
    """The sequences of the chosen groups as one side of a comparison."""
    rows = np.flatnonzero(chosen[run.groups])
    train, rollout, mask = (torch.cat([run.sequences[row][k] for row in rows]) for k in range(3))
    lengths = [len(run.sequences[row][0]) for row in rows]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    ids = {"group_ids": torch.tensor(run.groups[rows]), "sequence_ids": torch.tensor(rows)}
    summary = summarize(train, rollout, mask, offsets, consumers=consumers, **ids)
    return Side("half", summary, int(chosen.sum()))


def noised(run: Run, rng: np.random.Generator) -> Run:
    """The same sequences scored again: each log-ratio times a random sign, so that the spread of every group stays."""
    sequences = []
    for train, rollout, mask in run.sequences:
        sign = torch.tensor(rng.choice([-1.0, 1.0], len(train)))
        sequences.append((train, train - sign * (train - rollout), mask))
    return Run(run.name, sequences, run.groups)


def measure_paired(run: Run, trials: int, seed: int) -> Iterator[str]:
    """The paired test on two scorings of the same sequences that differ by nothing but their noise."""
    rng = np.random.default_rng(seed)
    everyone = np.ones(int(run.groups.max()) + 1, bool)
    paths = ["mismatch.mismatch_kl", "mismatch.mismatch_k3_kl", "token.rollout_is_mean", "geometric.rollout_is_mean"]
    hits = {path: 0 for path in paths}
    for _ in range(trials):
        tables = []
        for _ in range(2):
            consumer = SequenceConsumer(Settings())
            tables.append(half(noised(run, rng), everyone, (consumer,)).summary.extra[consumer.name])
        joined = join(tables[0], tables[1], ("a", "b"))
        assert joined is not None
        tests = paired_tests(joined).pooled
        for path in paths:
            hits[path] += tests[f"masked.{path}"].p < ALPHA
    yield f"{run.name}: paired test, same sequences scored twice, {trials} trials; p < 0.05 (claimed: 5 %):"
    for path, count in hits.items():
        low, high = interval(count, trials)
        yield f"    {path:<48} {count / trials:6.1%}  ({low:.1%} to {high:.1%})"


def measure(run: Run, splits: int, seed: int) -> Iterator[str]:
    """Lines of the report for one run."""
    rng = np.random.default_rng(seed)
    groups = int(run.groups.max()) + 1
    alarmed = gated = 0
    raw: dict[str, list[bool]] = {}
    for _ in range(splits):
        chosen = np.zeros(groups, bool)
        chosen[rng.permutation(groups)[: groups // 2]] = True
        a, b = half(run, chosen), half(run, ~chosen)
        comparison = compare_runs([a, b], paths=HEADLINE, series=(), alpha=ALPHA)
        gated += not evaluate(b.summary, baseline_limits(a.summary), a.summary).passed
        rows = comparison.pairs[0].rows
        alarmed += any(is_real(row) for row in rows)
        for row in rows:
            if row.test is not None:
                raw.setdefault(row.statistic, []).append(row.test.p < ALPHA)
    low, high = interval(alarmed, splits)
    yield f"{run.name}: {len(run.sequences)} sequences in {groups} groups, {splits} splits"
    yield f"  any change called: {alarmed} of {splits} = {alarmed / splits:.1%} (95 % interval {low:.1%} to {high:.1%}); claimed: at most 5 %"
    low, high = interval(gated, splits)
    yield f"  check against a baseline of the other half fails: {gated} of {splits} (95 % interval {low:.1%} to {high:.1%})"
    yield "  single rows, uncorrected p < 0.05 (claimed: 5 %):"
    for statistic, hits in raw.items():
        low, high = interval(sum(hits), len(hits))
        mark = "" if low <= ALPHA <= high else "  <- outside" if low > ALPHA else "  <- below"
        yield f"    {statistic:<48} {sum(hits) / len(hits):6.1%}  ({low:.1%} to {high:.1%}, {len(hits)} splits){mark}"


def interval(hits: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a share."""
    tail = (1.0 - level) / 2.0

    def solve(a: float, b: float, target: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if incomplete_beta(a, b, middle) < target else (low, middle)
        return low

    lower = solve(hits, trials - hits + 1, tail) if hits else 0.0
    return lower, solve(hits + 1, trials - hits, 1.0 - tail) if hits < trials else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description="false alarms of compare on two halves of one healthy run")
    parser.add_argument("dumps", nargs="*", type=Path)
    parser.add_argument("--splits", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [read(folder) for folder in options.dumps]
    if not runs:
        sample = Path(__file__).parents[1] / "sample_dumps" / "tiny_lm"
        runs = [read(sample), made("made: 64 groups of 8", 64, 8, 1), made("made: 200 groups of 4", 200, 4, 2)]
    for run in runs:
        for measured in (measure, measure_paired):
            for line in measured(run, options.splits, options.seed):
                print(line, flush=True)


if __name__ == "__main__":
    main()
