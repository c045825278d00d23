"""Groupings against the oracle: a group holds exactly the figures of its own tokens and sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from agree import differences
from made import Settings, Shard, analyze, randomly, sequences, shard, write_dump
from oracle import summarize as oracle_summary

from rollout_is.analysis import sums, units
from rollout_is.analysis.summary import Group, Statistic


def assert_group(group: Group, shards: list[Shard]) -> None:
    def actual(name: str) -> Statistic | None:
        view, section, metric = name.split(".")
        return group.views.get(view, {}).get(section, {}).get(metric)

    want = oracle_summary([s.packed() for s in shards])
    found = differences(actual, {k: v for k, v in want.items() if k.split(".")[0] in group.views})
    assert "masked" in group.views
    assert not found, "\n".join(found[:30])


@pytest.fixture(scope="module")
def shards() -> list[Shard]:
    rng = np.random.default_rng(9)
    made = [randomly(rng, segments=16) for _ in range(6)]
    for i, one in enumerate(made):
        one.columns["group_ids"] = torch.arange(16) % 5 + 5 * (i // 4)  # groups go on over ranks and steps
        one.columns["policy_version"] = torch.from_numpy(rng.integers(3, 6, len(one.train)))
    return made


def test_by_step_rank_and_shard(tmp_path: Path, shards: list[Shard]) -> None:
    got = analyze(write_dump(tmp_path, shards, ranks=2), settings=Settings(by=("step", "rank", "shard")))
    assert list(got.groups["step"]) == ["1", "2", "3"]
    assert sorted(got.groups["rank"]) == ["0", "1"]
    assert len(got.groups["shard"]) == 6
    for i in range(3):
        assert_group(got.groups["step"][str(i + 1)], shards[2 * i : 2 * i + 2])
    for rank in range(2):
        assert_group(got.groups["rank"][str(rank)], shards[rank::2])


def keep(one: Shard, wanted: list[int]) -> Shard:
    """The same shard with only some of its segments."""
    spans = [slice(one.cu[i], one.cu[i + 1]) for i in wanted]
    cu = np.cumsum([0, *[s.stop - s.start for s in spans]]).tolist()

    def take(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:0], *[x[s] for s in spans]])

    columns = {"group_ids": one.columns["group_ids"][wanted]} if "group_ids" in one.columns else {}
    return Shard(take(one.train), take(one.rollout), take(one.mask), cu, columns)


def test_by_group_id(tmp_path: Path, shards: list[Shard]) -> None:
    got = analyze(write_dump(tmp_path, shards, ranks=2), settings=Settings(by=("group",)))
    assert list(got.groups["group"]) == [str(key) for key in range(10)]
    for key in range(10):
        part = [keep(one, (one.columns["group_ids"] == key).nonzero().flatten().tolist()) for one in shards]
        assert_group(got.groups["group"][str(key)], part)


def test_by_length_counts_valid_tokens() -> None:
    rng = np.random.default_rng(11)
    lengths = [1, 2, 3, 4, 7, 8, 15, 16, 16, 40]
    one = sequences(*[(0.2 * rng.standard_normal(n)).tolist() for n in lengths])
    got = one.summarize(by=("length",))
    filled = [g for g in got.groups["length"].values() if g.sequences]
    edges = [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    assert len(filled) == len(edges)
    for group, (low, high) in zip(filled, edges, strict=True):
        members = [i for i, n in enumerate(lengths) if low <= n < high]
        assert group.sequences == len(members)
        assert_group(group, [keep(one, members)])


def test_by_version_splits_tokens(tmp_path: Path, shards: list[Shard]) -> None:
    got = analyze(write_dump(tmp_path, shards, ranks=2), settings=Settings(by=("version",)))
    assert sorted(got.groups["version"]) == ["3", "4", "5"]
    for key, group in got.groups["version"].items():
        part = [Shard(s.train, s.rollout, s.mask & (s.columns["policy_version"] == int(key)), s.cu, {}) for s in shards]
        want = oracle_summary([s.packed() for s in part])
        masked = group.views["masked"]
        assert masked["mismatch"]["mismatch_kl"].n == want["masked.mismatch.mismatch_kl"].n
        for section, name in (
            ("mismatch", "mismatch_kl"),
            ("mismatch", "mismatch_k3_kl"),
            ("mismatch", "mismatch_logprob_abs_diff"),
            ("token", "rollout_is_mean"),
            ("token", "rollout_is_eff_sample_size"),
        ):
            assert masked[section][name].value == pytest.approx(want[f"masked.{section}.{name}"].value, rel=1e-9)
        for section, name in (("sequence", "rollout_is_mean"), ("per_sequence", "rollout_is_seq_min")):
            found = masked[section][name]
            assert found.value is None and "token grouping" in (found.why or "")


def test_by_position_has_doubling_edges() -> None:
    got = sequences([0.1] * 8, [0.2] * 3, [0.5]).summarize(by=("position",))
    filled = [g for g in got.groups["position"].values() if g.valid_tokens]
    assert [g.valid_tokens for g in filled] == [3, 2, 3, 4]  # positions 0 | 1 | 2 3 | 4..7
    first = filled[0].views["masked"]["mismatch"]["mismatch_logprob_abs_diff"]
    assert first.value == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert filled[0].views["masked"]["sequence"]["rollout_is_mean"].value is None


def test_by_probability_has_the_stated_edges() -> None:
    p = np.array([1e-5, 1e-4 * 1.0001, 0.005, 0.05, 0.3, 0.7, 0.95, 0.995, 0.999])
    one = sequences(*[[0.01 * (i + 1)] for i in range(9)])
    one.rollout = torch.from_numpy(np.log(p))
    one.train = one.rollout + torch.arange(1, 10) / 100
    got = one.summarize(by=("probability",))
    filled = [g for g in got.groups["probability"].values() if g.valid_tokens]
    assert [g.valid_tokens for g in filled] == [1, 1, 1, 1, 1, 1, 1, 2]
    last = filled[-1].views["masked"]["mismatch"]["mismatch_logprob_abs_diff"].value
    assert last == pytest.approx(0.085)


def test_by_pack(tmp_path: Path) -> None:
    one = randomly(np.random.default_rng(12), segments=12)
    one.columns["cu_packs"] = torch.tensor([0, one.cu[5], one.cu[-1]])
    got = analyze(write_dump(tmp_path, [one]), settings=Settings(by=("pack",)))
    first, second = got.groups["pack"].values()
    assert_group(first, [keep(one, list(range(5)))])
    assert_group(second, [keep(one, list(range(5, 12)))])


def test_groups_partition_the_pool(tmp_path: Path, shards: list[Shard]) -> None:
    by = ("step", "rank", "shard", "pack", "position", "length", "probability", "version", "group")
    got = analyze(write_dump(tmp_path, shards, ranks=3), settings=Settings(by=by))
    for key in by:
        assert sum(g.valid_tokens for g in got.groups[key].values()) == got.coverage["valid_tokens"], key


def test_worst_tokens_are_those_of_largest_difference(tmp_path: Path, shards: list[Shard]) -> None:
    plain = [Shard(s.train, s.rollout, s.mask, s.cu) for s in shards]
    got = analyze(write_dump(tmp_path, plain, ranks=2), settings=Settings(top=4))
    d = np.concatenate([(s.train.double() - s.rollout.double())[s.mask].numpy() for s in plain])
    inside = np.sort(np.abs(d))[::-1][:4]
    listed = [abs(float(row["log_ratio"])) for row in got.worst["tokens"]]
    assert listed == pytest.approx(inside.tolist(), rel=1e-12)


def test_groups_of_a_sequence_longer_than_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first positions are masked: a part of it holds no valid token at all."""
    monkeypatch.setattr(units, "UNIT_POSITIONS", 2000)
    n = 6500
    rng = np.random.default_rng(15)
    r = -rng.exponential(1.0, n + 7)
    mask = np.zeros(n + 7, bool)
    mask[-3000:] = True
    one = Shard(
        torch.from_numpy(r + 0.1 * rng.standard_normal(n + 7)),
        torch.from_numpy(r),
        torch.from_numpy(mask),
        [0, n, n + 7],
    )
    one.columns["group_ids"] = torch.tensor([4, 9])
    got = one.summarize(by=("group", "length"))
    assert {k: (g.sequences, g.valid_tokens) for k, g in got.groups["group"].items()} == {"4": (1, 2993), "9": (1, 7)}
    assert_group(got.groups["group"]["4"], [keep(one, [0])])
    assert sorted(g.valid_tokens for g in got.groups["length"].values()) == [7, 2993]


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("-inf"), float("inf")])
def test_groups_with_values_that_are_not_finite(fill: float) -> None:
    """At valid tokens of one group; and under the mask, where only the unmasked view may see them."""
    rng = np.random.default_rng(16)
    one = sequences(*(0.2 * rng.standard_normal((6, 8))).tolist())
    one.mask[::3] = False
    one.rollout[~one.mask] = fill
    one.rollout[10], one.train[13] = float("-inf"), float("nan")
    one.columns["group_ids"] = torch.tensor([1, 1, 1, 2, 2, 2])
    got = one.summarize(by=("group",), veto_lower=1e-4)
    parts = {"1": keep(one, [0, 1, 2]), "2": keep(one, [3, 4, 5])}
    for key, part in parts.items():
        group, want = got.groups["group"][key], oracle_summary([part.packed()], veto_lower=1e-4)

        def actual(name: str, group: Group = group) -> Statistic | None:
            view, section, metric = name.split(".")
            return group.views.get(view, {}).get(section, {}).get(metric)

        found = differences(actual, {k: v for k, v in want.items() if k.split(".")[0] in group.views})
        assert not found, (key, *found[:20])


@pytest.mark.parametrize("pending", [0, 1 << 14])
def test_a_label_in_many_blocks_whose_tokens_lie_far_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pending: int
) -> None:
    """Tokens beyond the bounds are counted some blocks later; the sums of the block that begins meanwhile are not lost."""
    monkeypatch.setattr(sums, "PENDING", pending)
    rng = np.random.default_rng(12)
    n = 3 * 65536 + 1000
    r = -rng.exponential(2.0, n)
    t = r + 1.5 * rng.standard_normal(n)
    ones = {"group_ids": [7, 7], "policy_version": np.full(n, 3)}
    one = shard(t, r, rng.random(n) < 0.8, [0, n // 2, n], **ones)
    got = analyze(write_dump(tmp_path, [one]), settings=Settings(by=("group", "length", "version", "pack")))
    assert set(got.groups) == {"group", "length", "version", "pack"}
    for by, groups in got.groups.items():
        (group,) = [g for g in groups.values() if g.valid_tokens]
        for view, sections in group.views.items():
            for section, statistics in sections.items():
                for name, own in statistics.items():
                    want = got.views[view][section][name]
                    if by == "version" and own.why is not None and "sequences" in own.why:
                        continue  # a token grouping cuts sequences
                    assert (own.n, own.why) == (want.n, want.why), (by, view, section, name)
                    if want.value is None:
                        assert own.value is None
                        continue
                    assert own.value == pytest.approx(want.value, rel=1e-9, abs=1e-12), (by, view, section, name)
