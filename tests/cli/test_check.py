"""``check`` from the command line: what passes, what fails and why, and every way in which it is told."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gate_dumps import write_dump
from gate_summaries import ABS_DIFF, K3, series, summary

from rollout_is.analysis.gate.config import limits_from_mapping
from rollout_is.analysis.gate.evaluate import Verdict, evaluate
from rollout_is.analysis.summary import Statistic, Summary
from rollout_is.cli.app import main
from rollout_is.cli.github import workflow_commands, write_step_summary
from rollout_is.cli.junit import to_junit
from rollout_is.dumps.errors import UsageError

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_dumps"
VECTORS = ROOT / "tests" / "vectors" / "real"
FULL = ROOT.parent / "shared" / "reference" / "real_dumps"


def run(*argv: str | Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main([str(arg) for arg in argv], stdout=out, stderr=err)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder without any configuration above it that would be found."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    yield folder


def saved(path: Path, what: Summary) -> Path:
    path.write_text(what.to_json(), encoding="utf-8")
    return path


# --- dumps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed_padding", "tiny_lm", "multi_turn", "v1/packed_bf16.safetensors"])
def test_healthy_samples_pass(name: str) -> None:
    code, out, err = run("check", SAMPLES / name)
    assert (code, out.splitlines()[0]) == (0, "ok: 7 limits hold")
    assert "only the built-in set was checked" in err


BROKEN = {
    "duplicate_rank": "expected one shard for each step and rank",
    "empty": "found an empty file",
    "float8": "found F8_E4M3",
    "header_not_json": "expected a JSON header",
    "header_too_large": "found 126,000,000",
    "lengths_differ": "expected equal lengths",
    "lfs_pointer": "git-LFS pointer",
    "mask_nan": "found nan",
    "mask_negative": "found -1",
    "no_offsets": "cu_seqlens missing",
    "no_shards": "found none",
    "offsets_are_lengths": "found lengths",
    "offsets_decreasing": "offsets decrease",
    "offsets_float": "found F32",
    "offsets_not_from_0": "expected the first value to be 0",
    "offsets_past_end": "5 past the end",
    "offsets_wrapped": "int32 wrap?",
    "overlong": "12 extra bytes",
    "packs_off_boundary": "expected a sequence bound",
    "pickle": "never loaded",
    "rank_missing": "missing 1",
    "rank_outside_world": "rank 2 of 2",
    "repeated_tensor": "found it twice",
    "still_being_written": "short by 200",
    "tensor_missing": "rollout log-probs missing",
    "tensor_missing_everywhere": "2 of 2 shards",
    "text": "found text",
    "truncated": "short by 40",
    "two_candidates": "old_log_probs, prev_logprobs",
    "wrong_rank": "found [2, 4, 6]",
    "zeros": "zero bytes only",
}


def test_every_broken_sample_is_listed_here() -> None:
    assert {folder.name for folder in (SAMPLES / "broken").iterdir()} == set(BROKEN)


@pytest.mark.parametrize(("name", "reason"), BROKEN.items())
def test_broken_samples_fail_for_the_right_reason(name: str, reason: str) -> None:
    code, out, err = run("check", SAMPLES / "broken" / name)
    assert (code, out) == (3, "")
    assert reason in err
    assert "Traceback" not in err


def test_a_dump_without_a_valid_token_fails_the_built_in_set() -> None:
    code, out, _ = run("check", SAMPLES / "all_masked")
    assert code == 1
    assert out.splitlines()[:2] == [
        "failed: of 7 limits 2 broken",
        "FAIL coverage.valid_tokens: 0 is below the minimum 1 (built in)",
    ]


@pytest.mark.parametrize(
    ("fault", "limit"),
    [("nan", "coverage.nonfinite_valid_tokens"), ("zeros", "notes.all-zero-side"), ("fill", "notes.constant-value"), ("copy", "notes.duplicate-shards")],
)  # fmt: skip
def test_the_built_in_set_catches_what_no_reader_refuses(tmp_path: Path, fault: str, limit: str) -> None:
    from safetensors.torch import load_file, save_file

    dump = write_dump(tmp_path / "dump", {1: 0.01})
    path = dump / "step_0001_rank_1.safetensors"
    tensors = load_file(path)
    valid = tensors["response_mask"].nonzero()[:, 0]
    if fault == "nan":
        tensors["rollout_logprobs"][valid[3]] = float("nan")
    elif fault == "zeros":
        for each in sorted(dump.iterdir()):
            own = load_file(each)
            own["rollout_logprobs"].zero_()
            save_file(own, each, {"step": "1", "rank": each.stem[-1], "world_size": "2"})
        tensors = load_file(path)
    elif fault == "fill":
        tensors["rollout_logprobs"][valid[: len(valid) // 2]] = 0.0
    else:
        tensors = load_file(dump / "step_0001_rank_0.safetensors")
    save_file(tensors, path, {"step": "1", "rank": "1", "world_size": "2"})
    code, out, _ = run("check", dump, "--format", "json")
    failed = [one["statistic"] for one in json.loads(out)["limits"] if one["status"] != "pass"]
    assert (code, failed) == (1, [limit])


def test_a_limit_on_findings_calls_the_doctor(tmp_path: Path, elsewhere: Path) -> None:
    from safetensors.torch import load_file, save_file

    dump = write_dump(tmp_path / "dump", {1: 0.01, 2: 0.01})
    (elsewhere / "rollout-is.toml").write_text('[limits]\n"findings.alignment" = { max = 0, reason = "no shifts" }\n')
    assert run("check", dump)[0] == 0
    for path in dump.iterdir():
        tensors = load_file(path)
        tensors["rollout_logprobs"] = tensors["rollout_logprobs"].roll(1)
        save_file(tensors, path, {"step": str(int(path.stem[5:9])), "rank": path.stem[-1], "world_size": "2"})
    code, out, _ = run("check", dump)
    assert code == 1
    assert "FAIL findings.alignment: 1 is above the maximum 0 (rollout-is.toml:2)\n   why: no shifts" in out
    saved(elsewhere / "run.json", series({"1": 0.01}))
    code, out, _ = run("check", "run.json")
    assert code == 1
    assert "ERROR findings.alignment: the doctor has not looked at this summary" in out


# --- the default flow: baseline, then check --------------------------------------------------------------------------

STEPS = {step: 0.01 for step in (1, 2, 3, 4)}


@pytest.fixture
def baseline(tmp_path: Path, elsewhere: Path) -> Path:
    good = write_dump(tmp_path / "good", STEPS)
    code, _, err = run("baseline", good, "-o", "main.json", "--limits-out", "rollout-is.toml")
    assert (code, "next: rollout-is check" in err) == (0, True)
    return elsewhere / "main.json"


def failures(out: str) -> list[str]:
    return [line.split(":")[0] for line in out.splitlines() if line.startswith(("FAIL ", "ERROR "))]


def test_another_healthy_run_passes(tmp_path: Path, baseline: Path) -> None:
    again = write_dump(tmp_path / "again", STEPS, seed=2)
    code, out, _ = run("check", again)
    assert (code, failures(out)) == (0, [])
    assert run("check", again, "--baseline", baseline, "--limits", "/dev/null")[0] == 0


def test_stale_weights_from_step_3_are_caught_with_the_step(tmp_path: Path, baseline: Path) -> None:
    stale = write_dump(tmp_path / "stale", STEPS | {3: 0.1, 4: 0.1})
    code, out, _ = run("check", stale)
    assert code == 1
    first = " ".join(line.strip() for line in out.splitlines()[1:4])
    assert first.startswith(f"FAIL {ABS_DIFF}: step ")
    assert "2 of 4 steps outside (3, 4) (rollout-is.toml:9)" in first


def test_one_bad_rank_and_a_lost_mask_are_caught(tmp_path: Path, baseline: Path) -> None:
    for name, fault in (("rank", {"bad_rank": 0.1}), ("mask", {"mask_all": True})):
        code, out, _ = run("check", write_dump(tmp_path / name, STEPS, **fault))  # type: ignore[arg-type]
        assert code == 1
        assert f"FAIL {ABS_DIFF}" in failures(out)


def test_a_mismatch_that_vanished_is_caught_too(tmp_path: Path, baseline: Path) -> None:
    code, out, _ = run("check", write_dump(tmp_path / "copied", {step: 0.0 for step in STEPS}))
    assert code == 1
    assert "fell from" in out


def test_a_missing_step_is_an_error(tmp_path: Path, baseline: Path) -> None:
    code, out, _ = run("check", write_dump(tmp_path / "short", {1: 0.01, 2: 0.01, 3: 0.01}))
    assert code == 1
    assert f"ERROR {ABS_DIFF}: missing step 4, which the baseline holds (rollout-is.toml:9)" in " ".join(out.split())


def test_a_baseline_of_another_mask_is_an_error(tmp_path: Path, baseline: Path) -> None:
    dump = write_dump(tmp_path / "masks", STEPS, masks=True)
    code, out, _ = run("check", dump, "--mask", "pre_rejection")
    assert code == 1
    text = " ".join(out.split())
    assert "another definition: settings.mask is response_mask there and pre_rejection here" in text


def test_no_baseline_from_a_run_that_cannot_be_trusted(elsewhere: Path) -> None:
    code, out, err = run("baseline", SAMPLES / "all_masked", "-o", "main.json")
    assert (code, out) == (1, "")
    assert err.startswith("not a baseline: failed: of 7 limits 2 broken")
    assert not (elsewhere / "main.json").exists()


@pytest.mark.skipif(not FULL.is_dir(), reason="the full reference dumps (../shared) are not part of a clone")
@pytest.mark.parametrize(
    ("name", "code"), [("healthy", 0), ("multi_turn", 0), ("all_masked", 0), ("bad_rank", 1), ("stale", 1)]
)
def test_real_dumps(name: str, code: int) -> None:
    assert run("baseline", FULL / "healthy", "-o", "main.json", "--limits-out", "rollout-is.toml")[0] == 0
    got, out, _ = run("check", FULL / name)
    assert got == code
    if name == "stale":
        assert "2 of 4 steps outside (3, 4)" in " ".join(out.split())


def test_real_dumps_trimmed(elsewhere: Path) -> None:
    assert run("baseline", VECTORS / "healthy", "-o", "main.json")[0] == 0
    assert run("check", VECTORS / "healthy", "--baseline", "main.json")[0] == 0
    code, out, _ = run("check", VECTORS / "bad_rank", "--baseline", "main.json")
    assert code == 1
    assert f"FAIL {ABS_DIFF}" in failures(out)


# --- saved summaries: outputs, exit codes, configuration ---------------------------------------------------------------


def test_limits_are_found_upwards_and_every_line_is_told(elsewhere: Path) -> None:
    saved(elsewhere / "run.json", series({"1": 0.01}))
    (elsewhere / "pyproject.toml").write_text(
        f'[tool.rollout-is.limits]\n"{ABS_DIFF}" = {{ max = 0.001, reason = "ours" }}\n'
    )
    inner = elsewhere / "sub"
    inner.mkdir()
    code, out, err = run("check", "run.json")
    assert (code, err) == (1, "")
    assert f"FAIL {ABS_DIFF}: 0.01 is above the maximum 0.001 (pyproject.toml:2)\n   why: ours\n" in out
    assert run("check", "run.json", "--exit-zero")[0] == 0


def test_json_csv_markdown_hold_the_same_figures(elsewhere: Path) -> None:
    saved(elsewhere / "run.json", series({"1": 0.0123456789, "2": 0.0123456789}))
    saved(elsewhere / "main.json", series({"1": 0.01, "2": 0.01}))
    argv = ("check", "run.json", "--baseline", "main.json", "--limits", "/dev/null")
    (elsewhere / "l.toml").write_text(f'[limits]\n"{ABS_DIFF}" = {{ max_change = "10 %" }}\n')
    argv = ("check", "run.json", "--baseline", "main.json", "--limits", "l.toml")
    code, out, _ = run(*argv, "--format", "json")
    data = json.loads(out)
    assert (code, data["passed"], data["schema"]) == (1, False, "rollout-is/check/1")
    own = next(one for one in data["limits"] if one["statistic"] == ABS_DIFF)
    assert own["value"] == 0.0123456789
    assert own["change"] == pytest.approx(0.0023456789)
    assert own["origin"] == "l.toml:2"
    _, csv, _ = run(*argv, "--format", "csv")
    assert f"FAIL,{ABS_DIFF},0.0123456789,within ±10 %,0.01,{own['change']!r},l.toml:2" in csv.splitlines()
    _, markdown, _ = run(*argv, "--format", "markdown")
    assert f"| FAIL | {ABS_DIFF} | 0.0123 | within ±10 % | 0.0100 | +23.5 % | l.toml:2 |" in markdown.splitlines()


def test_usage_and_config_errors_exit_2(elsewhere: Path) -> None:
    saved(elsewhere / "run.json", series({"1": 0.01}))
    (elsewhere / "bad.toml").write_text('[limits]\n"a.b.c" = { maxx = 1 }\n')
    code, out, err = run("check", "run.json", "--limits", "bad.toml")
    assert (code, out) == (2, "")
    assert err.startswith("error: bad.toml:2\n") and "did you mean 'max'?" in err
    assert run("check", "run.json", "--limits", "none.toml")[0] == 2
    assert run("check", "run.json", "--upper", "3")[0] == 2
    (elsewhere / "dump").mkdir()
    code, _, err = run("check", "run.json", "--baseline", "dump")
    assert code == 2 and "rollout-is baseline dump -o main.json" in err
    for argv in (("baseline", "run.json", "-o", "x.json"), ("check", "run.json")):
        code, _, err = run(*argv, "--margin", "0")
        assert code == 2 and "expected a share above 0, found 0.0" in err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"schema": "rollout-is/summary/0"}',
        '{"schema": "rollout-is/compare/1"}',
        '{"schema": "rollout-is/summary/1"}',
    ],
)
def test_damaged_summaries_exit_3(elsewhere: Path, text: str) -> None:
    (elsewhere / "run.json").write_text(text)
    code, out, err = run("check", "run.json")
    assert (code, out) == (3, "")
    assert "run.json" in err and "Traceback" not in err
    saved(elsewhere / "good.json", series({"1": 0.01}))
    assert run("check", "good.json", "--baseline", "run.json")[0] == 3


def test_nan_that_somebody_wrote_into_the_json_is_an_error(elsewhere: Path) -> None:
    text = series({"1": 0.01}).to_json().replace('"value": 0.01', '"value": NaN', 1)
    (elsewhere / "run.json").write_text(text)
    (elsewhere / "l.toml").write_text(f'[limits]\n"{ABS_DIFF}" = {{ max = 1 }}\n')
    code, out, err = run("check", "run.json", "--limits", "l.toml")
    assert (code, out) == (3, "")
    assert "run.json" in err and "nan where a finite number is expected" in err


# --- JUnit and GitHub --------------------------------------------------------------------------------------------------


def mixed() -> Verdict:
    now = summary({ABS_DIFF: Statistic(0.5, 5), K3: Statistic(0.5, 5)})
    limits = limits_from_mapping(
        {
            "coverage.sequences": {"min": 1},
            K3: {"max": 0.1, "severity": "warning"},
            "masked.token.rollout_is_mean": {"max": 1},
            ABS_DIFF: {"max": 0.1, "reason": '100 % <ours> & \x07 "theirs"'},
        },
        "a,b:c.toml",
    )
    return evaluate(now, limits)


def test_junit_has_one_testcase_a_limit() -> None:
    suite = ElementTree.fromstring(to_junit(mixed())).find("testsuite")
    assert suite is not None
    assert {key: suite.get(key) for key in ("tests", "failures", "errors")} == {
        "tests": "4",
        "failures": "1",
        "errors": "1",
    }
    kinds = {case.get("classname"): [child.tag for child in case] for case in suite.findall("testcase")}
    assert kinds == {
        "coverage.sequences": [],
        K3: ["system-out"],
        "masked.token.rollout_is_mean": ["error"],
        ABS_DIFF: ["failure"],
    }
    failure = suite.find(f"testcase[@classname='{ABS_DIFF}']/failure")
    assert failure is not None
    assert failure.get("message") == "0.5 is above the maximum 0.1"
    assert failure.text == '0.5 is above the maximum 0.1\n100 % <ours> & \\u0007 "theirs"\nlimit from a,b:c.toml'
    strict = ElementTree.fromstring(to_junit(replace(mixed(), strict=True))).find("testsuite")
    assert strict is not None and strict.get("failures") == "2"


def test_github_annotations_are_escaped_and_failures_come_first() -> None:
    lines = workflow_commands(mixed()).splitlines()
    assert lines == [
        f'::error title=rollout-is%3A {ABS_DIFF}::0.5 is above the maximum 0.1%0A100 %25 <ours> & \x07 "theirs"',
        "::error title=rollout-is%3A masked.token.rollout_is_mean::no such statistic in the summary",
        f"::warning title=rollout-is%3A {K3}::0.5 is above the maximum 0.1",
    ]


def test_github_names_file_and_line_and_counts_beyond_ten(elsewhere: Path) -> None:
    ids = [f"masked.token.log_ratio_x{n}" for n in range(14)]
    (elsewhere / "a,b.toml").write_text("[limits]\n" + "".join(f'"{name}" = {{ max = 1 }}\n' for name in ids))
    saved(elsewhere / "run.json", series({"1": 0.01}))
    code, out, _ = run("check", "run.json", "--limits", "a,b.toml", "--github")
    commands = [line for line in out.splitlines() if line.startswith("::")]
    assert code == 1
    assert len(commands) == 10
    assert commands[0].startswith(f"::error file=a%2Cb.toml,line=2,title=rollout-is%3A {ids[0]}::")
    assert commands[-1] == "::error title=rollout-is::and 5 more limits; the step summary lists them all"
    code, out, err = run("check", "run.json", "--limits", "a,b.toml", "--github", "--format", "json")
    assert json.loads(out)["passed"] is False
    assert err.startswith("::error ")


def test_the_step_summary_gets_the_table(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(elsewhere / "run.json", series({"1": 0.01}))
    place = elsewhere / "summary.md"
    place.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
    assert run("check", "run.json", "--github", "--junit", "out.xml")[0] == 0
    text = place.read_text()
    assert text.startswith("before\n## rollout-is check\n\n**ok: 7 limits hold**\n")
    assert "| ok | coverage.valid\\_tokens |" in text or "| ok | coverage.valid_tokens |" in text
    assert ElementTree.parse(elsewhere / "out.xml").getroot().tag == "testsuites"
    code, _, stderr = run("check", "run.json", "--junit", "no/out.xml")
    assert code == 2 and "--junit no/out.xml" in stderr
    with pytest.raises(UsageError, match="GITHUB_STEP_SUMMARY"):
        write_step_summary("x", {"GITHUB_STEP_SUMMARY": str(elsewhere / "no" / "summary.md")})
    assert write_step_summary("x", {}) is None


# --- cost --------------------------------------------------------------------------------------------------------------

_PROBE = """
import sys, time
from rollout_is.cli.app import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "safetensors", "numpy") if name in sys.modules]
sys.stderr.write(f"heavy={heavy} code={code} seconds={time.process_time()}")
"""


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["check", "run.json", "--baseline", "main.json"], 0),
        (["compare", "main.json", "run.json"], 0),
        (["compare", "run.json", "--views", "masked,padded"], 1),
    ],
)
def test_saved_json_needs_no_torch_and_little_time(elsewhere: Path, argv: list[str], code: int) -> None:
    steps = {str(step): 0.01 for step in range(200)}
    saved(elsewhere / "run.json", series(steps))
    saved(elsewhere / "main.json", series(steps))
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *argv], capture_output=True, text=True, cwd=elsewhere, check=False
    )
    said, _, seconds = done.stderr.rpartition("heavy=")[2].rpartition(" seconds=")
    assert said == f"[] code={code}", done.stderr
    # processor time from the start of the interpreter on: what other processes do to the clock is not ours
    assert float(seconds) < 0.5
