"""``compare`` from the command line: runs, views, masks, scoring passes; what it refuses; the same figures in every format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from gate_dumps import SEQUENCES, write_dump
from gate_summaries import ABS_DIFF, K3, series, summary

from rollout_is.analysis.compare.passes import judge, odd_one_out, pass_pairs
from rollout_is.analysis.summary import Statistic, Summary
from rollout_is.cli.app import main

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_dumps"
FULL = ROOT.parent / "shared" / "reference" / "real_dumps"


def run(*argv: str | Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(["compare", *map(str, argv)], stdout=out, stderr=err)
    return code, out.getvalue(), err.getvalue()


def as_json(*argv: str | Path) -> dict[str, Any]:
    code, out, err = run(*argv, "--format", "json")
    assert code == 0, err
    data: dict[str, Any] = json.loads(out)
    return data


def rows(data: dict[str, Any], pair: int = 0) -> dict[str, dict[str, Any]]:
    return {row["statistic"]: row for row in data["pairs"][pair]["rows"]}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "main.json", tmp_path / "branch.json"
    a.write_text(series({str(s): 0.010 for s in range(1, 7)}).to_json())
    b.write_text(series({str(s): 0.010 if s < 4 else 0.1 for s in range(1, 7)}).to_json())
    return a, b


def test_the_table_reads_like_benchstat(saved: tuple[Path, Path]) -> None:
    code, out, err = run(*saved)
    assert (code, err) == (0, "")
    assert out == (Path(__file__).parents[1] / "golden" / "compare_saved.txt").read_text()


def test_labels(saved: tuple[Path, Path]) -> None:
    a, b = saved
    _, out, _ = run(f"before={a}", f"after={b}")
    assert out.startswith(
        "after against before: 1 worse of 1 tested; mismatch_logprob_abs_diff differs from step 4 on\n"
    )
    twice = as_json(a, a)
    assert [twice["pairs"][0][side] for side in "ab"] == [f"{a} (1)", f"{a} (2)"]


def test_every_format_holds_the_same_figures(saved: tuple[Path, Path]) -> None:
    data = as_json(*saved)
    own = rows(data)[ABS_DIFF]
    _, text, _ = run(*saved, "--format", "csv")
    table = list(csv.DictReader(io.StringIO(text)))
    pooled = next(line for line in table if line["statistic"] == ABS_DIFF and not line["step"])
    for key, value in (
        ("value_a", own["a"]["value"]),
        ("stderr_b", own["b"]["stderr"]),
        ("change", own["change"]),
        ("p", own["test"]["p"]),
        ("p_corrected", own["test"]["p_corrected"]),
    ):
        assert float(pooled[key]) == value
    assert [line["step"] for line in table if line["step"]] == ["1", "2", "3", "4", "5", "6"]
    _, markdown, _ = run(*saved, "--format", "markdown")
    assert "| mismatch_logprob_abs_diff | 0.0100 | 1.00e-4 | 0.0550 | 1.00e-4 | x5.50 | \\<1e-12 | worse |" in markdown


def test_three_sides(saved: tuple[Path, Path], tmp_path: Path) -> None:
    third = tmp_path / "third.json"
    third.write_text(series({str(s): 0.010 for s in range(1, 7)}).to_json())
    data = as_json(*saved, third)
    assert [(pair["a"], pair["b"]) for pair in data["pairs"]] == [
        ("main", "branch"),
        ("main", "third"),
    ]
    assert data["verdict"] == (
        "branch against main: 1 worse of 1 tested; mismatch_logprob_abs_diff differs from step 4 on; "
        "third against main: no real change in 1 tested figures"
    )


def test_settings_stand_above_the_table_and_strict_refuses(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    figures = {ABS_DIFF: Statistic(0.01, 9999, 1e-5)}
    a.write_text(summary(figures, source={"metadata": {"logprobs_mode": ["raw"]}}).to_json())
    b.write_text(
        summary({ABS_DIFF: Statistic(0.3, 9999, 1e-5)}, source={"metadata": {"logprobs_mode": ["processed"]}}).to_json()
    )
    code, out, _ = run(a, b)
    assert code == 0
    assert out.index("settings that differ") < out.index("b against a, view masked")
    assert (
        "metadata.logprobs_mode  raw" in out
        and "worse" not in out.split("view masked")[1].split("[1]")[0].split("step")[0]
    )
    code, out, err = run(a, b, "--strict")
    assert (code, out) == (1, "")
    assert "expected equal settings, found metadata.logprobs_mode raw and processed" in err
    assert run(a, a, "--strict")[0] == 0


def test_what_cannot_be_compared_exits_1(tmp_path: Path, saved: tuple[Path, Path]) -> None:
    later, empty = tmp_path / "later.json", tmp_path / "empty.json"
    later.write_text(series({"7": 0.01, "8": 0.01}).to_json())
    empty.write_text(summary({ABS_DIFF: Statistic(None, 0, why="no valid tokens")}, valid_tokens=0).to_json())
    for other, says in ((later, "expected common steps"), (empty, "found none on this one")):
        code, out, err = run(saved[0], other)
        assert (code, out) == (1, "")
        assert says in err
    assert run(saved[0], later, "--ignore-steps")[0] == 0
    assert run(saved[0], saved[1], "--view", "corrected")[0] == 1


def test_wrong_usage_exits_2_and_missing_files_3(saved: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = saved
    for argv, says in (
        ([a, b, "--views", "masked,padded"], "expected one dump with --views, found 2"),
        ([a, "--views", "masked"], "expected two different names A,B"),
        ([a, "--views", "masked,maskd"], "found 'maskd'"),
        ([a, "--views", "masked,padded", "--masks", "x,y"], "expected one of --views, --masks and --logprobs"),
        ([a, "--masks", "x,y"], "expected a dump, found a saved summary"),
        ([SAMPLES / "tiny_lm", "--logprobs", "train,rollout"], "expected a scoring pass beside train and rollout"),
        ([a, b, "--stat", "mismatch_k3"], "did you mean"),
        ([a, b, "--stat", "rollout_is_mean"], "needs its level"),
        ([a, b, "--alpha", "2"], "expected a level between 0 and 1"),
        ([a, b, "--upper", "3"], "found a saved summary"),
    ):
        code, out, err = run(*argv)  # type: ignore[arg-type]
        assert (code, out) == (2, ""), argv
        assert says in err, argv
    assert run(a, tmp_path / "none.json")[0] == 3


def test_rows_on_request(saved: tuple[Path, Path], tmp_path: Path) -> None:
    assert list(rows(as_json(*saved, "--stat", "mismatch_logprob_abs_diff"))) == [ABS_DIFF]
    dump = write_dump(tmp_path / "dump", {1: 0.01})
    everything = rows(as_json(dump, dump, "--all"))
    assert len(everything) > 50
    assert {row["verdict"] for row in everything.values()} <= {"same", "untested"}


# --- dumps -----------------------------------------------------------------------------------------------------------


def test_the_same_dump_twice_is_the_same_everywhere(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump", {1: 0.01, 2: 0.01})
    data = as_json(f"a={dump}", f"b={dump}")
    assert data["verdict"].startswith("b against a: no real change in ")
    assert {row["verdict"] for row in rows(data).values()} == {"same", "untested"}
    assert data["pairs"][0]["matched_sequences"] == 4 * SEQUENCES


def test_stale_weights_are_found_with_their_step_by_a_paired_test(tmp_path: Path) -> None:
    steps = {1: 0.01, 2: 0.01, 3: 0.01, 4: 0.01}
    good = write_dump(tmp_path / "good", steps)
    bad = write_dump(tmp_path / "bad", steps | {3: 0.1, 4: 0.1})
    data = as_json(good, bad)
    own = rows(data)[ABS_DIFF]
    assert (own["verdict"], own["test"]["kind"]) == ("worse", "paired t")
    series_ = next(one for one in data["pairs"][0]["series"] if one["statistic"] == ABS_DIFF)
    assert (series_["starts_at"], series_["share_after"]) == ("3", 1.0)
    assert [step["verdict"] for step in series_["steps"].values()] == ["same", "same", "worse", "worse"]
    assert sum(data["pairs"][0]["histogram"]["a"]) == sum(data["pairs"][0]["histogram"]["b"])
    unpaired = rows(as_json(good, bad, "--unpaired"))[ABS_DIFF]
    assert unpaired["test"]["kind"] == "Welch t"
    _, out, _ = run(good, bad)
    assert f"paired t-test ({8 * SEQUENCES} sequences held by both sides)" in " ".join(out.split())
    assert "histogram of train - rollout log-prob" in out


def test_a_dump_against_a_saved_summary_is_not_paired(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump", {1: 0.01, 2: 0.01})
    out = io.StringIO()
    assert main(["analyze", str(dump), "--by", "step", "--format", "json"], stdout=out) == 0
    file = tmp_path / "saved.json"
    file.write_text(out.getvalue())
    for sides in ((dump, file), (file, dump)):
        data = as_json(*sides)
        assert {row["verdict"] for row in rows(data).values()} == {"same", "untested"}
        assert data["pairs"][0]["matched_sequences"] is None


def test_other_tokens_under_the_same_ids(tmp_path: Path) -> None:
    a = write_dump(tmp_path / "a", {1: 0.01}, ids=True)
    b = write_dump(tmp_path / "b", {1: 0.01}, ids=True, seed=2)
    code, out, err = run(a, b)
    assert (code, out) == (1, "")
    assert "found other tokens at all" in err
    assert run(a, b, "--unpaired")[0] == 0


def test_c59_metadata_of_dumps(tmp_path: Path) -> None:
    a = write_dump(tmp_path / "a", {1: 0.01}, metadata={"logprobs_mode": "raw"})
    b = write_dump(tmp_path / "b", {1: 0.2}, metadata={"logprobs_mode": "processed"})
    data = as_json(a, b)
    assert data["pairs"][0]["differences"][0]["key"] == "metadata.logprobs_mode"
    assert rows(data)[ABS_DIFF]["verdict"] == "changed"
    assert data["verdict"].startswith(
        "b does not measure what a does: metadata.logprobs_mode is raw there and processed here"
    )


def test_views_are_what_one_dump_is_compared_by() -> None:
    code, out, _ = run(SAMPLES / "packed_padding")
    assert code == 0
    assert out.startswith("masked against unmasked: ")
    assert "two views of the same tokens are not two samples" in out
    padded = as_json(SAMPLES / "packed_padding", "--views", "padded,masked")
    low = rows(padded)["per_sequence.rollout_is_seq_min"]
    assert low["a"]["value"] == 0.0
    assert low["b"]["value"] == pytest.approx(0.991, abs=1e-3)
    assert low["test"] is None


def test_masks_of_one_dump_are_tested_in_pairs(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump", {1: 0.1, 2: 0.1}, masks=True)
    data = as_json(dump, "--masks", "response_mask,pre_rejection")
    assert (data["kind"], data["pairs"][0]["differences"]) == ("masks", [])
    own = rows(data)[ABS_DIFF]
    assert (own["test"]["kind"], own["verdict"]) == ("paired t", "~")
    assert own["a"]["n"] < own["b"]["n"]
    # two thirds of the tokens are on both sides: the change has less noise than two independent samples would
    independent = (own["a"]["stderr"] ** 2 + own["b"]["stderr"] ** 2) ** 0.5
    assert own["test"]["stderr"] < 0.7 * independent
    assert run(dump, "--masks", "response_mask,none")[0] in (2, 3)


@pytest.mark.parametrize(
    ("noise", "again", "odd"),
    [(0.2, 0.01, "rollout"), (0.01, 0.2, "train_again"), (0.01, 0.01, None)],
)
def test_c82_three_passes_have_a_noise_floor_and_an_odd_one_out(
    tmp_path: Path, noise: float, again: float, odd: str | None
) -> None:
    dump = write_dump(tmp_path / "dump", {1: noise, 2: noise}, passes={"train_again": again})
    data = as_json(dump, "--logprobs", "train,train_again")
    assert data["kind"] == "logprobs"
    assert data["odd_one_out"] == odd
    # E|N(0, s)| = s sqrt(2/pi)
    assert data["noise_floor"] == pytest.approx(again * 0.7979, rel=0.1)
    gaps = {(one["a"], one["b"]): one["mean_abs_diff"] for one in data["passes"]}
    assert gaps["train", "rollout"] == pytest.approx(noise * 0.7979, rel=0.1)
    assert f"noise floor between train passes {data['noise_floor']:.3g}; train against rollout" in data["verdict"]
    own = rows(data)[ABS_DIFF]
    assert own["test"]["kind"] == "paired t"
    if odd == "rollout":
        assert data["verdict"].startswith("rollout is the odd one out: train, train_again agree to 0.00")
        assert own["verdict"] == "worse"


def test_a_prefill_pass_tells_engine_from_trainer() -> None:
    data = as_json(SAMPLES / "tiny_lm", "--logprobs", "train,prefill")
    assert data["odd_one_out"] == "train"  # float32 here, bfloat16 in both passes of the engine
    assert data["noise_floor"] is None


def test_pairs_of_passes() -> None:
    assert pass_pairs(["rollout", "train"]) == [("train", "rollout")]
    assert pass_pairs(["prefill", "train"]) == [("train", "prefill"), ("train", "rollout"), ("prefill", "rollout")]
    assert odd_one_out({("a", "b"): 0.1}) is None
    assert odd_one_out({("a", "b"): 0.0, ("a", "c"): 0.0, ("b", "c"): 0.0}) is None
    assert odd_one_out({("a", "b"): 0.0, ("a", "c"): 0.1, ("b", "c"): 0.1}) == "c"

    def of(gap: float | None) -> Summary:
        return summary(
            {ABS_DIFF: Statistic(gap, 9, why=None if gap is not None else "no valid tokens"), K3: Statistic(0.0, 9)}
        )

    verdict, data = judge(
        {("train", "train_2"): of(0.0), ("train", "rollout"): of(0.1), ("train_2", "rollout"): of(None)}
    )
    assert verdict == "noise floor between train passes 0; train against rollout 0.1"
    assert data["passes"][2]["mean_abs_diff"] is None
    assert judge({("a", "b"): of(None)})[0] == "the passes could not be compared"


@pytest.mark.skipif(not FULL.is_dir(), reason="the full reference dumps (../shared) are not part of a clone")
@pytest.mark.parametrize(("name", "starts"), [("stale", "3"), ("bad_rank", "1"), ("healthy", None)])
def test_real_dumps(name: str, starts: str | None) -> None:
    data = as_json(f"main={FULL / 'healthy'}", f"run={FULL / name}")
    own = rows(data)[ABS_DIFF]
    series_ = next(one for one in data["pairs"][0]["series"] if one["statistic"] == ABS_DIFF)
    assert series_["starts_at"] == starts
    assert own["verdict"] == ("same" if name == "healthy" else "worse")


@pytest.mark.skipif(not FULL.is_dir(), reason="the full reference dumps (../shared) are not part of a clone")
def test_two_healthy_real_dumps_differ_in_their_text_alone() -> None:
    verdicts = {
        name.rpartition(".")[2]: row["verdict"]
        for name, row in rows(as_json(FULL / "healthy", FULL / "multi_turn")).items()
    }
    of_the_text = {verdicts.pop("mismatch_training_ppl"), verdicts.pop("mismatch_rollout_ppl")}
    assert of_the_text == {"changed"}
    assert set(verdicts.values()) == {"~", "same", "untested"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", True, [1]])
def test_a_saved_figure_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    assert main(["analyze", str(SAMPLES / "all_masked"), "--format", "json", "-o", str(tmp_path / "a.json")]) == 1
    data = json.loads((tmp_path / "a.json").read_text())
    data["views"]["unmasked"]["token"]["rollout_is_mean"]["value"] = value
    (tmp_path / "b.json").write_text(json.dumps(data))
    for argv in (
        ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")],
        ["analyze", str(tmp_path / "b.json")],
    ):
        err = io.StringIO()
        assert main(argv, stdout=io.StringIO(), stderr=err) == 3
        assert "b.json" in err.getvalue() and "where a finite number is expected" in err.getvalue()
