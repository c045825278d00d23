"""Per-sequence sums and the paired test, against plain numpy: joins by ids and tokens, groups, partial overlap, fragments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gate_dumps import SEQUENCES, write_dump

from rollout_is.analysis.compare.overlay import EDGES, RatioHistogram
from rollout_is.analysis.compare.paired import SEQUENCE_MEANS, TOKEN_MEANS, join, paired_tests
from rollout_is.analysis.compare.runs import NothingComparable
from rollout_is.analysis.compare.sequences import QUANTITIES, SequenceConsumer, SequenceSums
from rollout_is.analysis.compare.tails import t_two_sided
from rollout_is.analysis.pipeline import analyze, summarize
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary

LABELS = ("a", "b")


def read(path: Path, settings: Settings | None = None, **options: Any) -> tuple[Summary, SequenceSums]:
    consumer = SequenceConsumer(settings or Settings())
    summary = analyze(path, settings=settings, consumers=(consumer,), **options)
    table = summary.extra[consumer.name]
    assert isinstance(table, SequenceSums)
    return summary, table


def in_memory(
    lengths: list[int], seed: int = 0, **columns: torch.Tensor
) -> tuple[np.ndarray[Any, Any], Summary, SequenceSums]:
    """d of each token, and what we make of it; the first token of each sequence is masked."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    train = -rng.exponential(1.0, total)
    d = rng.normal(0.0, 0.4, total)
    mask = np.ones(total, bool)
    mask[np.cumsum([0, *lengths[:-1]])] = False
    consumer = SequenceConsumer(Settings())
    summary = summarize(
        torch.tensor(train),
        torch.tensor(train - d),
        torch.tensor(mask),
        torch.tensor([0, *np.cumsum(lengths)]),
        consumers=(consumer,),
        **columns,
    )
    return np.where(mask, d, np.nan), summary, summary.extra[consumer.name]


def test_sums_are_those_of_each_sequence() -> None:
    lengths = [5, 1, 9, 2]  # the second has no valid token
    d, _, table = in_memory(lengths)
    parts = [part[~np.isnan(part)] for part in np.split(d, np.cumsum(lengths)[:-1])]
    parts = [part for part in parts if len(part)]
    assert table.n.tolist() == [4, 8, 1]
    expected = {
        "d": [p.sum() for p in parts],
        "abs": [np.abs(p).sum() for p in parts],
        "d2": [(p**2).sum() for p in parts],
        "e": [np.expm1(p).sum() for p in parts],
        "e2": [(np.expm1(p) ** 2).sum() for p in parts],
        "exp_abs": [np.exp(np.abs(p)).sum() for p in parts],
        "extreme": [(np.abs(p) > math.log(2)).sum() for p in parts],
        "high": [(p > math.log(2)).sum() for p in parts],
        "low": [(p < math.log(0.5)).sum() for p in parts],
    }
    for name, values in expected.items():
        assert table.sums[QUANTITIES.index(name)] == pytest.approx(values, rel=1e-9), name


def test_every_mean_of_the_table_is_the_one_in_the_summary() -> None:
    _, summary, table = in_memory([7, 5, 12, 30, 3])
    n = table.n.astype(np.float64)
    for means, denominator in ((TOKEN_MEANS, n), (SEQUENCE_MEANS, np.ones_like(n))):
        for path, numerator in means.items():
            statistic = summary.get(f"masked.{path}")
            assert statistic is not None and statistic.value is not None, path
            assert numerator(table.sums, n).sum() / denominator.sum() == pytest.approx(
                statistic.value, rel=1e-9, abs=1e-12
            ), path


def test_unpaired_clusters_give_the_standard_error_of_the_summary() -> None:
    """Against a side that is constant 0, the error of the change is the clustered error of METRICS.md."""
    _, summary, table = in_memory([7, 5, 12, 30, 3])
    still = SequenceSums(table.step, table.place, None, None, None, table.n, np.zeros_like(table.sums))
    joined = join(still, table, LABELS, same_dump=True)
    assert joined is not None
    tests = paired_tests(joined).pooled
    for name in (
        "mismatch.mismatch_logprob_abs_diff",
        "mismatch.mismatch_k3_kl",
        "token.rollout_is_mean",
        "geometric.rollout_is_mean",
    ):
        statistic = summary.get(f"masked.{name}")
        assert statistic is not None and statistic.stderr is not None
        assert tests[f"masked.{name}"].stderr == pytest.approx(statistic.stderr, rel=1e-9), name


def test_the_paired_test_is_the_textbook_one_for_sequences_of_one_token() -> None:
    rng = np.random.default_rng(5)
    a, b = (np.abs(rng.normal(0, s, 50)) for s in (1.0, 1.2))

    def table(values: np.ndarray[Any, Any]) -> SequenceSums:
        sums = np.zeros((len(QUANTITIES), 50))
        sums[QUANTITIES.index("abs")] = values
        place = np.arange(50, dtype=np.uint64)
        return SequenceSums(np.zeros(50, np.int64), place, None, None, None, np.ones(50, np.int64), sums)

    joined = join(table(a), table(b), LABELS, same_dump=True)
    assert joined is not None
    test = paired_tests(joined).pooled["masked.mismatch.mismatch_logprob_abs_diff"]
    diff = b - a
    stderr = diff.std(ddof=1) / math.sqrt(50)
    assert test.stderr == pytest.approx(stderr, rel=1e-12)
    assert test.p == pytest.approx(t_two_sided(diff.mean() / stderr, 49), rel=1e-9)


def test_equal_tokens_are_joined_and_pairing_is_sharper(tmp_path: Path) -> None:
    steps = {1: 0.3, 2: 0.3}
    _, a = read(write_dump(tmp_path / "a", steps))
    _, b = read(write_dump(tmp_path / "b", steps, noise_seed=9))
    joined = join(a, b, LABELS)
    assert joined is not None
    assert (joined.matched, joined.clusters, joined.by) == (4 * SEQUENCES, 4 * SEQUENCES, "token_ids")
    paired = paired_tests(joined)
    assert set(paired.by_step) == {"1", "2"}
    assert paired.notes == (
        f"{4 * SEQUENCES} of {4 * SEQUENCES} sequences are held by both sides (by equal tokens) and tested pair by pair",
    )
    # the perplexity of a sequence is shared by both sides: its spread cancels in the pairs
    name = "masked.mismatch.mismatch_training_log_ppl"
    assert paired.pooled[name].stderr == 0.0
    assert paired.pooled[name].p == 1.0


def test_only_some_steps_are_shared(tmp_path: Path) -> None:
    _, a = read(write_dump(tmp_path / "a", {1: 0.1, 2: 0.1}, seed=1))
    first = write_dump(tmp_path / "b", {1: 0.1}, seed=1)
    other = write_dump(tmp_path / "c", {2: 0.1}, seed=2)
    for path in other.iterdir():
        path.rename(first / path.name)
    _, b = read(first)
    joined = join(a, b, LABELS)
    assert joined is not None
    assert (joined.matched, joined.clusters) == (2 * SEQUENCES, 6 * SEQUENCES)
    paired = paired_tests(joined)
    assert set(paired.by_step) == {"1"}
    assert "the others as independent samples" in paired.notes[0]
    # by hand: matched sequences contribute their difference, the others their own residual
    sums, n = (a.sums[1], b.sums[1]), (a.n.astype(float), b.n.astype(float))
    h = [(s - s.sum() / m.sum() * m) / m.sum() for s, m in zip(sums, n, strict=True)]
    one_a, one_b = a.step == 1, b.step == 1
    order = [int(np.flatnonzero(a.tokens[one_a] == token)[0]) for token in b.tokens[one_b]]  # type: ignore[index, union-attr]
    u = np.concatenate([h[1][one_b] - h[0][one_a][order], h[0][~one_a], h[1][~one_b]])
    expected = math.sqrt(len(u) / (len(u) - 1) * (u**2).sum())
    assert paired.pooled["masked.mismatch.mismatch_logprob_abs_diff"].stderr == pytest.approx(expected, rel=1e-9)


def test_nothing_shared_is_no_pair(tmp_path: Path) -> None:
    _, a = read(write_dump(tmp_path / "a", {1: 0.1}, seed=1))
    _, b = read(write_dump(tmp_path / "b", {1: 0.1}, seed=2))
    assert join(a, b, LABELS) is None
    _, bare = read(write_dump(tmp_path / "c", {1: 0.1}, seed=1, tokens=False))
    assert join(a, bare, LABELS) is None


def test_ids_join_and_other_tokens_under_the_same_ids_are_refused(tmp_path: Path) -> None:
    _, a = read(write_dump(tmp_path / "a", {1: 0.1}, seed=1, ids=True))
    _, b = read(write_dump(tmp_path / "b", {1: 0.2}, seed=1, noise_seed=3, ids=True))
    joined = join(a, b, LABELS)
    assert joined is not None
    assert (joined.by, joined.matched) == ("sequence_ids", 2 * SEQUENCES)
    _, other = read(write_dump(tmp_path / "c", {1: 0.1}, seed=2, ids=True))
    with pytest.raises(NothingComparable, match=f"other tokens at all {2 * SEQUENCES} common sequences") as caught:
        join(a, other, LABELS)
    assert "--unpaired" in caught.value.fix
    # ids alone are trusted: without tokens there is nothing to check them by
    _, bare = read(write_dump(tmp_path / "d", {1: 0.1}, seed=2, ids=True, tokens=False))
    assert join(a, bare, LABELS) is not None


def test_groups_are_the_clusters_where_they_are_dumped() -> None:
    groups = torch.tensor([1, 1, 2, 2, 3, 3])
    ids = torch.arange(6)
    _, _, a = in_memory([6, 4, 7, 5, 9, 3], group_ids=groups, sequence_ids=ids)
    _, _, b = in_memory([6, 4, 7, 5, 9, 3], seed=1, group_ids=groups, sequence_ids=ids)
    joined = join(a, b, LABELS)
    assert joined is not None
    assert (joined.matched, joined.clusters) == (6, 3)
    test = paired_tests(joined).pooled["masked.mismatch.mismatch_logprob_abs_diff"]
    assert test.df == 2
    h = [(t.sums[1] - t.sums[1].sum() / t.n.sum() * t.n) / t.n.sum() for t in (a, b)]
    u = (h[1] - h[0]).reshape(3, 2).sum(axis=1)
    assert test.stderr == pytest.approx(math.sqrt(3 / 2 * (u**2).sum()), rel=1e-9)


def test_the_hash_is_of_the_whole_segment_and_of_its_order() -> None:
    tokens = torch.tensor([5, 6, 7, 7, 6, 5, 5, 6, 7])
    _, _, table = in_memory([3, 3, 3], token_ids=tokens)
    assert table.tokens is not None
    assert table.tokens[0] == table.tokens[2] != table.tokens[1]
    wide = in_memory([3, 3, 3], token_ids=tokens.to(torch.int32))[2]
    assert wide.tokens is not None
    assert (wide.tokens == table.tokens).all()


def test_long_sequences_that_are_cut_into_units_are_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [40, 7, 25, 90]
    tokens = torch.arange(sum(lengths)) % 11
    _, _, whole = in_memory(lengths, token_ids=tokens)
    from rollout_is.analysis import units

    monkeypatch.setattr(units, "UNIT_POSITIONS", 16)
    assert sum(unit.fragment for unit in units.cut_units(np.cumsum([0, *lengths]))) == 11
    _, _, cut = in_memory(lengths, token_ids=tokens)
    assert cut.n.tolist() == whole.n.tolist()
    assert cut.sums == pytest.approx(whole.sums, rel=1e-12)
    assert cut.tokens is not None and whole.tokens is not None
    assert (cut.tokens == whole.tokens).all()
    assert (cut.place == whole.place).all()


def test_more_workers_change_not_one_bit(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "a", {1: 0.1, 2: 0.1}, ids=True)
    one, two = read(dump, workers=1)[1], read(dump, workers=2)[1]
    for name in ("step", "place", "ids", "tokens", "n", "sums"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name


def test_the_histogram_counts_every_valid_token_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    dump = write_dump(tmp_path / "a", {1: 0.5})
    histogram = RatioHistogram()
    counts = analyze(dump, consumers=(histogram,)).extra[histogram.name]
    expected = np.zeros(len(EDGES) + 1, np.int64)
    for path in dump.iterdir():
        x = load_file(path)
        d = (x["train_logprobs"].double() - x["rollout_logprobs"].double())[x["response_mask"]].numpy()
        expected += np.histogram(d, [-np.inf, *EDGES, np.inf])[0]
    assert list(counts) == expected.tolist()
    assert list(EDGES) == sorted(EDGES)


def test_too_many_sequences_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_is.analysis.compare import sequences

    dump = write_dump(tmp_path / "a", {1: 0.1})
    segments = 2 * (SEQUENCES + 1)  # two ranks, a pad segment each
    for most, kept in ((segments, True), (segments - 1, False), (3, False)):
        monkeypatch.setattr(sequences, "MOST", most)
        consumer = SequenceConsumer(Settings())
        assert (analyze(dump, consumers=(consumer,)).extra[consumer.name] is not None) is kept
