"""The streamed policies against their definition: every figure recomputed from ``evaluate`` with plain numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from rollout_is.analysis import units
from rollout_is.analysis.pareto import pareto_k
from rollout_is.analysis.pipeline import summarize
from rollout_is.analysis.policies import PRESETS, Policy, evaluate, parse_policy
from rollout_is.analysis.policies.consumer import PolicyConsumer
from rollout_is.analysis.policies.corrected import with_corrected

SPECS = [
    *PRESETS,
    "token:clip:lower=0.8,upper=1.2",
    "token:zero:lower=0.9,upper=1.1+geometric:mask:lower=0.98,upper=1.02",
    "sequence:zero:lower=0.5,upper=2+token:mask:lower=0.7,upper=1.4",
    "sequence:clip:lower=0.5,upper=2,normalize=sequence+veto:zero:lower=0.3,upper=3",
    "token:truncate:upper=1.1,normalize=token+sum.k2:mask:upper=0.4",
    "token.k2:mask:upper=0.005+token:raw",
    "token.k3:zero:upper=0.02",
    "max.k3:mask:upper=0.2",
    "max.k2:zero:upper=0.3+geometric:raw",
    "sum.k3:mask:upper=0.5",
    "mean.k2:mask:lower=0.0001,upper=0.05",
    "token.k2:mask:lower=0.00001",
    "token:mask:lower=0.5,upper=2,exclusive",
    "mean.mult:zero:upper=1.1",
]


def dump(seed: int = 7, sequences: int = 90) -> dict[str, Any]:
    """Packed tokens with prompts, gaps, fully masked segments, a zero-length one, heavy tails."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, sequences)
    lengths[5] = 0
    total = int(lengths.sum())
    r = -rng.exponential(1.0, total)
    d = rng.normal(0, 0.05, total) + np.where(rng.uniform(size=total) < 0.03, rng.standard_t(2, total), 0.0)
    d[rng.integers(0, total, 3)] = (25.0, -30.0, 6.0)
    mask = rng.uniform(size=total) < 0.8
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for i in range(0, sequences, 11):
        mask[offsets[i] : offsets[i + 1]] = False
    adv = np.repeat(rng.normal(size=sequences), lengths)
    return {"t": r + d, "r": r, "mask": mask, "offsets": offsets, "advantages": adv}


def streamed(data: dict[str, Any], policies: list[Policy]) -> list[dict[str, Any]]:
    summary = summarize(
        torch.tensor(data["t"]),
        torch.tensor(data["r"]),
        torch.tensor(data["mask"]),
        torch.tensor(data["offsets"]),
        advantages=torch.tensor(data["advantages"], dtype=torch.float32),
        consumers=[PolicyConsumer(policies)],
        metadata={"step": "3", "rank": "0"},
    )
    found = summary.extra["policies"]["policies"]
    assert len(found) == len(policies)
    return [f["total"] for f in found]


def same(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else bool(a == pytest.approx(b, rel=1e-9, abs=1e-11))


def expected(data: dict[str, Any], policy: Policy) -> dict[str, float | None]:
    """The figures by definition."""
    t, r, mask, offsets = data["t"], data["r"], data["mask"], data["offsets"]
    applied = evaluate(policy, t, r, mask, offsets, advantages=data["advantages"])
    d = t - r
    lost = mask & (applied.zeroed | ~applied.keep)
    kept = mask & ~lost
    left = mask & applied.keep
    w = applied.weights
    rows = [np.flatnonzero(mask[a:b]) + a for a, b in itertools.pairwise(offsets) if mask[a:b].any()]
    means = np.array([w[i][left[i]].mean() for i in rows if left[i].any()])
    gone = sum(bool(lost[i].all()) for i in rows)
    n, tokens = int(left.sum()), int(mask.sum())
    s1, s2 = w[left].sum(), np.square(w[left]).sum()
    out: dict[str, float | None] = {
        "rejected_token_fraction": lost.sum() / tokens,
        "rejected_token_fraction_of_all": lost.sum() / mask.size,
        "rejected_sequence_fraction": gone / len(rows),
        "rejected_sequence_fraction_of_all": gone / int((np.diff(offsets) > 0).sum()),
        "touched_sequence_fraction": sum(bool(lost[i].any()) for i in rows) / len(rows),
        "changed_token_fraction": applied.changed.sum() / tokens,
        "mean": s1 / n if n else None,
        "kept_kl": -d[kept].mean() if kept.any() else None,
        "kept_k3_kl": (np.expm1(d) - d)[kept].mean() if kept.any() else None,
        "rejected_kl": -d[lost].mean() if lost.any() else None,
        "rejected_k3_kl": (np.expm1(d) - d)[lost].mean() if lost.any() else None,
    }
    if n and s1 > 0:
        out |= {
            "std": w[left].std(),
            "min": w[left].min(),
            "max": w[left].max(),
            "ess": s1**2 / (n * s2),
            "ess_kept": s1**2 / (tokens * s2),
            "max_weight_share": w[left].max() / s1,
            "seq_mean": means.mean(),
            "seq_std": means.std(ddof=1),
            "seq_min": means.min(),
            "seq_max": means.max(),
            "seq_max_deviation": np.abs(means - 1).max(),
            "seq_max_weight_share": means.max() / means.sum(),
        }
    return out


@pytest.mark.parametrize("spec", SPECS)
def test_streamed_figures_are_those_of_the_definition(spec: str) -> None:
    data, policy = dump(), parse_policy(spec)
    total = streamed(data, [policy])[0]
    for name, want in expected(data, policy).items():
        found = total["figures"][name]["value"]
        if want is None:
            assert found is None and total["figures"][name]["why"], name
        else:
            assert found == pytest.approx(float(want), rel=1e-9, abs=1e-11), name


def test_many_policies_at_once_give_what_each_gives_alone() -> None:
    data = dump(8)
    policies = [parse_policy(spec) for spec in SPECS]
    for spec, together, policy in zip(SPECS, streamed(data, policies), policies, strict=True):
        alone = streamed(data, [policy])[0]
        assert together["counts"] == alone["counts"], spec
        assert together["by_rule"] == alone["by_rule"], spec
        for name, figure in alone["figures"].items():
            assert same(figure["value"], together["figures"][name]["value"]), (spec, name)


def test_sequences_longer_than_a_unit_are_judged_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dump(9, 60)
    policies = [parse_policy(spec) for spec in SPECS]
    whole = streamed(data, policies)
    monkeypatch.setattr(units, "UNIT_POSITIONS", 32)
    monkeypatch.setattr(units, "CHUNK_POSITIONS", 8)
    monkeypatch.setattr(units, "BLOCK_TOKENS", 8)
    cut = streamed(data, policies)
    for spec, a, b in zip(SPECS, whole, cut, strict=True):
        assert a["counts"] == b["counts"] and a["by_rule"] == b["by_rule"], spec
        for name, figure in a["figures"].items():
            if name != "pareto_k":
                assert same(figure["value"], b["figures"][name]["value"]), (spec, name)


def test_by_rule_counts_what_each_rule_alone_rejects() -> None:
    data = dump(10)
    policy = parse_policy("token:mask:lower=0.5,upper=2+veto:lower=0.01+geometric:mask:lower=0.95,upper=1.05")
    found = streamed(data, [policy])[0]["by_rule"]
    applied = evaluate(policy, data["t"], data["r"], data["mask"], data["offsets"])
    assert [rule["tokens"] for rule in found] == [int(rejected.sum()) for rejected in applied.rejected_by]
    assert all(rule["rule"] for rule in found)


def test_k_hat_is_that_of_the_sequences_mean_applied_weights() -> None:
    data, policy = dump(11, 300), parse_policy("token:truncate:upper=20")
    applied = evaluate(policy, data["t"], data["r"], data["mask"], data["offsets"])
    rows = [
        applied.weights[a:b][data["mask"][a:b]].mean()
        for a, b in itertools.pairwise(data["offsets"])
        if data["mask"][a:b].any()
    ]
    want = pareto_k(np.log(rows), len(rows)).value
    assert streamed(data, [policy])[0]["figures"]["pareto_k"]["value"] == pytest.approx(want, abs=1e-9)


def test_weights_beyond_float64_have_a_reason_and_no_number() -> None:
    t, r = torch.tensor([0.0, -1.0, -1.0]), torch.tensor([-800.0, -1.0, -1.0])
    summary = summarize(
        t, r, torch.ones(3), torch.tensor([0, 1, 3]), consumers=[PolicyConsumer([parse_policy("nemo-rl/is")])]
    )
    total = summary.extra["policies"]["policies"][0]["total"]
    assert total["counts"]["held"] == 1
    assert all(f["value"] is None or math.isfinite(f["value"]) for f in total["figures"].values())


def expected_view(data: dict[str, Any], policy: Policy, bounds: tuple[float, float]) -> dict[str, float]:
    """The corrected view by definition, over the tokens that keep a weight."""
    t, r, mask, offsets = data["t"], data["r"], data["mask"], data["offsets"]
    applied = evaluate(policy, t, r, mask, offsets, advantages=data["advantages"])
    left, d = mask & applied.keep, t - r
    kept, w = left & ~applied.zeroed, applied.weights
    rows = [np.flatnonzero(kept[a:b]) + a for a, b in itertools.pairwise(offsets) if kept[a:b].any()]
    x = np.array([w[a:b][left[a:b]].mean() for a, b in itertools.pairwise(offsets) if left[a:b].any()])
    diff = np.array([(r[i] - t[i]).mean() for i in rows])
    p, q = np.exp(t[kept]), np.exp(r[kept])
    out = {
        "token.rollout_is_ratio_fraction_high": (w[left] > bounds[1]).mean(),
        "token.rollout_is_ratio_fraction_low": (w[left] < bounds[0]).mean(),
        "per_sequence.rollout_is_seq_fraction_high": (x > bounds[1]).mean(),
        "per_sequence.rollout_is_seq_fraction_low": (x < bounds[0]).mean(),
        "mismatch.mismatch_kl": -d[kept].mean(),
        "mismatch.mismatch_k2_kl": np.square(d[kept]).mean() / 2,
        "mismatch.mismatch_k3_kl": (np.expm1(d) - d)[kept].mean(),
        "mismatch.mismatch_logprob_abs_diff": np.abs(d[kept]).mean(),
        "mismatch.mismatch_logprob_diff_std": d[kept].std(),
        "mismatch.mismatch_logprob_abs_diff_max": np.abs(d[kept]).max(),
        "mismatch.mismatch_prob_abs_diff": np.abs(p - q).mean(),
        "mismatch.mismatch_prob_abs_diff_max": np.abs(p - q).max(),
        "mismatch.mismatch_mult_prob_error": np.exp(np.abs(d[kept])).mean(),
        "mismatch.mismatch_extreme_fraction": (np.abs(d[kept]) > math.log(2)).mean(),
        "mismatch.mismatch_training_log_ppl": np.mean([-t[i].mean() for i in rows]),
        "mismatch.mismatch_rollout_log_ppl": np.mean([-r[i].mean() for i in rows]),
        "mismatch.mismatch_training_ppl": np.mean([np.exp(-t[i].mean()) for i in rows]),
        "mismatch.mismatch_rollout_ppl": np.mean([np.exp(-r[i].mean()) for i in rows]),
        "mismatch.mismatch_log_ppl_diff": diff.mean(),
        "mismatch.mismatch_log_ppl_abs_diff": np.abs(diff).mean(),
        "mismatch.mismatch_log_ppl_diff_max": diff.max(),
        "mismatch.mismatch_log_ppl_diff_min": diff.min(),
        "mismatch.mismatch_ppl_ratio": np.exp(diff).mean(),
        "mismatch.mismatch_chi2_token": np.exp(2 * d[kept]).mean() - 1,
        "mismatch.mismatch_chi2_seq": np.mean([np.exp(2 * d[i].sum()) for i in rows]) - 1,
        "mismatch.mismatch_chi2_geometric": np.mean([np.exp(2 * d[i].mean()) for i in rows]) - 1,
    }
    levels = {"none": ("sequence", "geometric"), "token": ("sequence", "geometric")}
    for level in levels.get(policy.weight.level, (policy.weight.level,)):
        over = np.sum if level == "sequence" and policy.weight.level == "token" else np.mean
        logs = np.array([over(np.log(w[i])) for i in rows])
        u = np.exp(logs)
        at = f"{level}.rollout_is_"
        out |= {f"{at}mean": u.mean(), f"{at}min": u.min(), f"{at}max": u.max(), f"{at}std": u.std()}
        out |= {
            f"{at}eff_sample_size": u.sum() ** 2 / (u.size * np.square(u).sum()),
            f"{at}max_weight_share": u.max() / u.sum(),
        }
        out |= {f"{at}ratio_fraction_high": (u > bounds[1]).mean(), f"{at}ratio_fraction_low": (u < bounds[0]).mean()}
    return {name: float(value) for name, value in out.items()}


@pytest.mark.parametrize("spec", [s for s in SPECS if "normalize" not in s and s != "slime/mis"])
def test_the_corrected_view_is_that_of_the_survivors(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, policy = dump(12), parse_policy(spec)
    monkeypatch.setattr(units, "UNIT_POSITIONS", 500)
    summary = summarize(
        torch.tensor(data["t"]),
        torch.tensor(data["r"]),
        torch.tensor(data["mask"]),
        torch.tensor(data["offsets"]),
        advantages=torch.tensor(data["advantages"], dtype=torch.float32),
        consumers=[PolicyConsumer([policy], "policy", (0.5, 2.0))],
    )
    corrected = with_corrected(summary)
    for path, want in expected_view(data, policy, (0.5, 2.0)).items():
        found = corrected.get(f"corrected.{path}")
        assert found is not None, path
        loose = 1e-6 if path.endswith("_std") else 1e-9
        assert found.value == pytest.approx(want, rel=loose, abs=1e-9), path


def test_valid_tokens_without_a_finite_log_ratio_are_counted_and_said() -> None:
    t = torch.tensor([-1.0, float("nan"), -1.0, -float("inf")])
    summary = summarize(
        t,
        torch.full((4,), -1.0),
        torch.ones(4),
        torch.tensor([0, 4]),
        consumers=[PolicyConsumer([parse_policy("icepop")], "policy", (0.5, 2.0))],
    )
    corrected = with_corrected(summary)
    counts = corrected.extra["policy"]["total"]["counts"]
    assert (counts["tokens"], counts["unjudged"]) == (2, 2)
    assert any(n.code == "policy-unjudged" and n.message.startswith("2 valid tokens") for n in corrected.notes)


def test_products_beyond_float64_keep_their_logs() -> None:
    d = torch.tensor([500.0, 400.0, 1.0, 0.5], dtype=torch.float64)
    r = torch.full((4,), -1000.0, dtype=torch.float64)
    consumer = PolicyConsumer([parse_policy("sequence:raw")], "policy", (0.5, 2.0))
    summary = with_corrected(summarize(r + d, r, torch.ones(4), torch.tensor([0, 2, 4]), consumers=[consumer]))
    mean, smallest = (summary.get(f"corrected.sequence.rollout_is_{x}") for x in ("mean", "min"))
    assert mean is not None and mean.value is None and mean.why == "overflow"
    assert mean.log_value == pytest.approx(900.0 - math.log(2))
    assert smallest is not None and smallest.value == pytest.approx(math.exp(1.5))
    share = summary.get("corrected.sequence.rollout_is_max_weight_share")
    assert share is not None and share.value == 1.0
