"""The pytest plugin, run as its users run it, and that it leaves everybody else alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from gate_summaries import ABS_DIFF, TOKEN_MEAN, series, summary

from rollout_is.analysis.summary import Statistic

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project of its own with two saved runs in it."""
    pytester.path.joinpath("run.json").write_text(series({"1": 0.01, "2": 0.02}).to_json())
    pytester.path.joinpath("main.json").write_text(series({"1": 0.01, "2": 0.01}).to_json())
    return pytester


def outcomes(pytester: pytest.Pytester, body: str, *args: str) -> pytest.RunResult:
    pytester.makepyfile("from rollout_is.pytest_plugin import assert_within\n" + body)
    known = () if _installed() else ("-p", "rollout_is.pytest_plugin")
    return pytester.runpytest_inprocess(*known, "-p", "no:cacheprovider", *args)


def _installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == "rollout_is.pytest_plugin" for point in entry_points(group="pytest11"))


def test_a_run_within_its_limits_passes(project: pytest.Pytester) -> None:
    body = f"""
def test_it(rollout_is_summary):
    summary = rollout_is_summary("run.json")
    assert summary is rollout_is_summary("run.json")
    assert_within(summary, {{"{ABS_DIFF}": {{"max": 0.1, "per_step": "any"}}}})
"""
    outcomes(project, body).assert_outcomes(passed=1)


def test_a_failure_reads_as_the_limits_that_do_not_hold(project: pytest.Pytester) -> None:
    body = f"""
def test_it(rollout_is_summary):
    limits = {{
        "{ABS_DIFF}": [{{"max": 0.011, "per_step": "any", "reason": "agreed in review"}}, {{"max": 1}}],
        "{TOKEN_MEAN}": {{"min": 0.9}},
    }}
    assert_within(rollout_is_summary("run.json"), limits)
"""
    result = outcomes(project, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E   *AssertionError: rollout-is: 2 of 10 limits do not hold",
            f"E *{ABS_DIFF}: step 2: 0.02 is above the maximum 0.011; 1 of 2 steps outside (2)",
            "E *limit: <= 0.011, every step (assert_within)",
            "E *why: agreed in review",
            f"E *{TOKEN_MEAN}: not evaluated: no such statistic in the summary",
        ]
    )
    assert "pytest_plugin.py" not in result.stdout.str()  # the traceback ends in the user's own test


def test_a_limit_file_with_its_baseline(project: pytest.Pytester) -> None:
    project.path.joinpath("rollout-is.toml").write_text(
        f'baseline = "main.json"\n[limits]\n"{ABS_DIFF}" = {{ max_change = "20 %" }}\n'
    )
    body = """
def test_good(rollout_is_summary):
    assert_within(rollout_is_summary("main.json"), "rollout-is.toml")

def test_bad(rollout_is_summary):
    assert_within(rollout_is_summary("run.json"), "rollout-is.toml")
"""
    result = outcomes(project, body)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*rose from 0.01 to 0.015: a change of 0.005, allowed is 0.002*", "*rollout-is.toml:3*"]
    )


def test_a_dump_is_analysed_with_settings(project: pytest.Pytester) -> None:
    from gate_dumps import write_dump

    write_dump(project.path / "dump", {1: 0.01, 2: 0.01})
    body = f"""
def test_it(rollout_is_summary):
    summary = rollout_is_summary("dump", by=("step",))
    assert list(summary.groups["step"]) == ["1", "2"]
    assert_within(summary, {{"{ABS_DIFF}": {{"min": 0.001, "max": 0.1, "per_step": "any"}}}})
"""
    outcomes(project, body).assert_outcomes(passed=1)


def test_the_built_in_set_strictness_and_no_limit_at_all() -> None:
    from rollout_is.pytest_plugin import assert_within

    bad = summary({ABS_DIFF: Statistic(0.1, 9)}, nonfinite_valid_tokens=2)
    with pytest.raises(AssertionError, match="nonfinite_valid_tokens: 2 is above the maximum 0"):
        assert_within(bad, {})
    with pytest.raises(AssertionError, match="no limit was checked"):
        assert_within(bad, {}, builtin=False)
    warned = {ABS_DIFF: {"max": 0.01, "severity": "warning"}}
    assert_within(summary({ABS_DIFF: Statistic(0.1, 9)}), warned)
    with pytest.raises(AssertionError, match=r"0\.1 is above"):
        assert_within(summary({ABS_DIFF: Statistic(0.1, 9)}), warned, strict=True)


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"rollout_is": "rollout_is.pytest_plugin"}


def test_whoever_does_not_use_it_pays_nothing_and_sees_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it():\n    pass\n")
    probe = """
import sys, pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
ours = sorted(name for name in sys.modules if name.startswith("rollout_is"))
heavy = [name for name in ("torch", "numpy", "typer", "rich", "safetensors") if name in sys.modules]
print("probe", int(code), ours, heavy)
"""
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # what other plugins load is not ours
    done = subprocess.run(
        [sys.executable, "-c", probe, "-p", "rollout_is.pytest_plugin"],
        capture_output=True, text=True, cwd=pytester.path, check=False, env=alone,
    )  # fmt: skip
    said = done.stdout.splitlines()
    assert said[-1] == "probe 0 ['rollout_is', 'rollout_is.pytest_plugin'] []", done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "rollout" not in "\n".join(said[:-1])
