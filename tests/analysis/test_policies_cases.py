"""Reported cases that concern corrections, by their number: what was cut is shown, with both denominators, before the survivors."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_is.analysis.pipeline import summarize
from rollout_is.analysis.policies import evaluate, explain_policy, parse_policy
from rollout_is.analysis.policies.consumer import PolicyConsumer
from rollout_is.analysis.policies.corrected import with_corrected
from rollout_is.analysis.profiles import profile
from rollout_is.analysis.summary import Summary
from rollout_is.cli.app import main
from rollout_is.dumps.errors import UsageError
from rollout_is.dumps.writer import DumpWriter


def analysed(
    d: list[float] | np.ndarray[Any, Any], spec: str, offsets: list[int] | None = None, mask: Any = None
) -> Summary:
    """The summary of tokens with these log-ratios under a policy."""
    rollout = torch.full((len(d),), -1.0, dtype=torch.float64)
    train = rollout + torch.as_tensor(np.asarray(d, dtype=np.float64))
    valid = torch.ones(len(d)) if mask is None else torch.as_tensor(mask)
    cu = torch.tensor([0, len(d)] if offsets is None else offsets)
    consumer = PolicyConsumer([parse_policy(spec)], "policy", (0.5, 2.0))
    return with_corrected(summarize(train, rollout, valid, cu, consumers=[consumer]))


def value(summary: Summary, path: str) -> float | None:
    statistic = summary.get(path)
    assert statistic is not None, path
    return statistic.value


def test_c31_raw_and_applied_weights_stand_side_by_side_with_the_share_changed() -> None:
    summary = analysed(np.log([0.1, 1, 1, 9]), "token:truncate:upper=2")
    raw = [value(summary, f"masked.token.rollout_is_{x}") for x in ("min", "mean", "max")]
    applied = [value(summary, f"corrected.token.rollout_is_{x}") for x in ("min", "mean", "max")]
    assert raw == pytest.approx([0.1, 2.775, 9])
    assert applied == pytest.approx([0.1, 1.025, 2])
    assert value(summary, "corrected.veto.changed_token_fraction") == 0.25


def test_c32_raw_truncated_and_band_masked_means_are_three_numbers() -> None:
    d = [-0.5, 2.5, -0.2]
    truncated = analysed(d, "token:truncate:upper=5")
    band = analysed(d, "icepop:lower=0.5,upper=5")
    assert value(truncated, "masked.token.rollout_is_mean") == pytest.approx(4.536, abs=5e-4)
    assert value(truncated, "corrected.token.rollout_is_mean") == pytest.approx(2.142, abs=5e-4)
    assert value(band, "corrected.token.rollout_is_mean") == pytest.approx(0.475, abs=5e-4)


def test_c34_raw_and_applied_maximum_are_two_fields() -> None:
    summary = analysed(np.log([1.0, 50.0]), "verl/token_tis")
    assert value(summary, "masked.token.rollout_is_max") == pytest.approx(50)
    assert value(summary, "corrected.token.rollout_is_max") == pytest.approx(2)


def test_c35_rejected_tokens_stay_in_the_denominator() -> None:
    summary = analysed(np.log([1.0, 1.0, 1.0, 9.0]), "token:mask:upper=2")
    assert value(summary, "masked.token.rollout_is_ratio_fraction_high") == 0.25
    assert value(summary, "corrected.veto.rejected_token_fraction") == 0.25
    total = summary.extra["policy"]["total"]
    assert (total["counts"]["tokens"], total["counts"]["tokens_masked"], total["figures"]["mean"]["n"]) == (4, 1, 3)


def test_c37_survivors_look_healthy_so_both_denominators_come_first(tmp_path: Path) -> None:
    """512 sequences, 80 without valid tokens, 280 of the other 432 rejected."""
    rng = np.random.default_rng(3)
    d = rng.normal(0, 0.001, (512, 4))
    d[:280] += 1.0
    mask = np.ones((512, 4), dtype=bool)
    mask[432:] = False
    with DumpWriter(tmp_path / "d") as writer:
        rollout = torch.full((2048,), -2.0, dtype=torch.float64) - torch.rand(2048, dtype=torch.float64)
        writer.write(
            step=1,
            train_logprobs=rollout + torch.tensor(d.ravel()),
            rollout_logprobs=rollout,
            response_mask=torch.tensor(mask.ravel()),
            cu_seqlens=torch.arange(0, 2049, 4),
        )
    out = io.StringIO()
    args = ["analyze", str(tmp_path / "d"), "--policy", "geometric:mask:lower=0.9,upper=1.1"]
    assert main(args, stdout=out) == 0
    text = out.getvalue()
    assert "64.8 %" in text and "54.7 %" in text
    assert text.index("64.8 %") < text.index("mean token ratio of each sequence")
    out = io.StringIO()
    assert main([*args, "-f", "json"], stdout=out) == 0
    summary = Summary.from_dict(json.loads(out.getvalue()))
    assert value(summary, "corrected.veto.rejected_sequence_fraction") == pytest.approx(280 / 432)
    assert value(summary, "corrected.veto.rejected_sequence_fraction_of_all") == pytest.approx(280 / 512)
    assert value(summary, "corrected.mismatch.mismatch_k3_kl") == pytest.approx(5e-7, rel=0.2)
    note = next(n for n in summary.notes if n.code == "policy-rejects" and "sequence" in n.metric)
    assert note.severity == "warning" and "64.8%" in note.message and "54.7% of all" in note.message


def test_c37_the_share_that_is_noted_can_be_set() -> None:
    summary = analysed(np.log([1.0, 1.0, 1.0, 9.0]), "token:mask:upper=2")
    assert any(n.code == "policy-rejects" for n in summary.notes)
    consumer = PolicyConsumer([parse_policy("token:mask:upper=2")], "policy", (0.5, 2.0))
    t = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    quiet = with_corrected(
        summarize(t, torch.full((4,), -1.0), torch.ones(4), torch.tensor([0, 4]), consumers=[consumer]), share=0.3
    )
    assert not any(n.code == "policy-rejects" for n in quiet.notes)


def test_c38_bounds_on_k1_act_on_the_inverse_ratio_and_the_preset_says_so() -> None:
    d = np.log([1.5, 0.65])
    own = evaluate(parse_policy("token:mask:lower=0.6,upper=1.4"), d, [0, 0], [1, 1], [0, 2])
    assert own.keep.tolist() == [False, True]  # as the bounds read
    verl = evaluate(parse_policy("verl/token_k1:lower=0.6,upper=1.4"), d, [0, 0], [1, 1], [0, 2])
    assert verl.keep.tolist() == [True, False]  # the framework's own rule
    assert "1 / ratio" in str(explain_policy("verl/token_k1")["oddity"])
    summary = analysed(d, "verl/token_k1:lower=0.6,upper=1.4")
    assert any(n.code == "policy-oddity" and "1 / ratio" in n.message for n in summary.notes)


@pytest.mark.parametrize("order", [("1.2", "0.8"), ("5", "0.5")])
def test_c39_reversed_bounds_are_refused_with_both_values(order: tuple[str, str]) -> None:
    for spec in (f"token:clip:lower={order[0]},upper={order[1]}", f"xtuner/truncate:lower={order[0]},upper={order[1]}"):
        with pytest.raises(UsageError) as caught:
            parse_policy(spec)
        assert order[0] in caught.value.problem and order[1] in caught.value.problem
    with pytest.raises(UsageError, match="bounds are named"):
        parse_policy("token:clip:0.8,1.2")


def test_c40_one_token_vetoes_a_sequence_so_the_share_grows_with_length() -> None:
    rng = np.random.default_rng(40)
    shares, rates = [], []
    for length in (10, 1000):
        d = np.where(rng.uniform(size=100 * length) < 1e-3, -12.0, 0.0)
        summary = analysed(d, "veto:lower=0.0001", list(range(0, 100 * length + 1, length)))
        rule = summary.extra["policy"]["total"]["by_rule"][0]
        shares.append(rule["sequences"] / 100)
        rates.append(float((d < -9).mean()))
        assert value(summary, "corrected.veto.rejected_sequence_fraction") == rule["sequences"] / 100
    assert shares[0] <= 0.05 and 0.5 < shares[1] < 0.75
    assert max(rates) < 2e-3
    for bad in ("veto:lower=0", "veto:upper=-1", "xtuner/both:veto_lower=0"):
        with pytest.raises(UsageError, match="expected a finite ratio > 0"):
            parse_policy(bad)


def test_c41_the_policy_is_labelled_with_the_mask_that_it_judged_under(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "d") as writer:
        t = torch.tensor([-1.0, -1.0, -2.0, -1.0])
        writer.write(
            step=1,
            train_logprobs=t,
            rollout_logprobs=t,
            response_mask=torch.tensor([1, 1, 0, 1]),
            cu_seqlens=torch.tensor([0, 4]),
        )
    out = io.StringIO()
    assert main(["analyze", str(tmp_path / "d"), "--policy", "icepop"], stdout=out) == 0
    text = " ".join(out.getvalue().split())
    assert "judged under mask response_mask" in text
    assert "pre-rejection mask not present" in text


def test_c16_a_policy_that_rejects_everything_leaves_nulls_and_the_rule_by_name() -> None:
    summary = analysed([0.5] * 10, "geometric:mask:lower=0.99,upper=1.01", [0, 5, 10])
    assert value(summary, "masked.token.rollout_is_mean") == pytest.approx(math.exp(0.5))
    assert value(summary, "corrected.veto.rejected_token_fraction") == 1.0
    assert value(summary, "corrected.veto.rejected_sequence_fraction") == 1.0
    for path in (
        "token.rollout_is_mean",
        "token.rollout_is_max",
        "per_sequence.rollout_is_seq_min",
        "mismatch.mismatch_kl",
    ):
        statistic = summary.get(f"corrected.{path}")
        assert statistic is not None and statistic.value is None
        assert statistic.why is not None and "every token was rejected (unless the geometric mean" in statistic.why


def test_c16_zeroing_everything_keeps_n_and_says_mean_0() -> None:
    summary = analysed([2.0] * 4, "icepop:lower=0.5,upper=2")
    mean = summary.get("corrected.token.rollout_is_mean")
    assert mean is not None and (mean.value, mean.n) == (0.0, 4)
    assert value(summary, "corrected.veto.rejected_token_fraction") == 1.0


def test_c36_a_policy_that_changes_nothing_is_seen_to_change_nothing() -> None:
    summary = analysed([0.1, -0.1], "token:mask:lower=0.5,upper=2")
    assert value(summary, "corrected.veto.rejected_token_fraction") == 0.0
    rejected = summary.extra["policy"]["total"]["figures"]["rejected_k3_kl"]
    assert rejected["value"] is None and rejected["why"] == "no token was rejected"


def test_c89_variants_of_the_effective_sample_size() -> None:
    """Seven weights 1 and one 11: 0.316 as they are, 0.920 cut at 2."""
    d = np.log([1.0] * 7 + [11.0])
    summary = analysed(d, "token:truncate:upper=2")
    assert value(summary, "masked.token.rollout_is_eff_sample_size") == pytest.approx(0.316, abs=5e-4)
    assert value(summary, "corrected.token.rollout_is_eff_sample_size") == pytest.approx(0.920, abs=5e-4)
    t = torch.tensor(d, dtype=torch.float32) - 3.0
    logged = profile("xtuner", {"rollout_is_threshold": [2.0, 0.5]})(
        t, torch.full((8,), -3.0), torch.ones(8), torch.tensor([0, 8])
    )
    assert logged.metrics["rollout_is/mismatch/rollout_is_eff_sample_size"] == pytest.approx(0.920, abs=5e-4)


def test_c94_the_catastrophic_sequences_are_those_that_the_error_threshold_drops() -> None:
    d = np.repeat(np.where(np.arange(64) < 12, math.log(300.0), math.log(1.03)), 5)
    summary = analysed(d, "nemo-rl/seq-logprob-error:upper=1.5", list(range(0, 321, 5)))
    assert value(summary, "masked.mismatch.mismatch_mult_prob_error") == pytest.approx(57.1, abs=0.05)
    assert value(summary, "corrected.veto.rejected_sequence_fraction") == 0.1875
    assert value(summary, "corrected.token.rollout_is_mean") == 1.0  # no weight: rejection only
