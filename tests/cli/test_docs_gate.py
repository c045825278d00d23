"""What docs/ci.md and docs/compare.md print is run: commands, the limit file, the GitHub job, the pytest module."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from gate_dumps import write_dump

from rollout_is.analysis.gate.config import load_config
from rollout_is.cli.app import main

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ci.md", "compare.md")}


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sample_dumps").symlink_to(ROOT / "sample_dumps")
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_console_examples(page: str, checkout: Path) -> None:
    ran = 0
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            words = shlex.split(command)
            assert words[0] == "rollout-is"
            out, err = io.StringIO(), io.StringIO()
            assert main(words[1:], stdout=out, stderr=err) == 0, err.getvalue()
            shown, cut, _ = output.partition("...\n")
            assert out.getvalue().startswith(shown) if cut else output in ("", out.getvalue()), command
            ran += 1
    assert ran >= 2


def test_the_limit_file_reads_as_described(tmp_path: Path) -> None:
    (block,) = blocks("ci.md", "toml")
    path = tmp_path / "rollout-is.toml"
    path.write_text(block)
    config = load_config(path)
    assert config.baseline == str(tmp_path / "main.json")
    assert [limit.describe() for limit in config.limits] == [
        "<= 0.001",
        "0.98 .. 1.02, last step",
        "within ±50 % or ±0.0002",
        "<= 0.1, at most 5 % of steps outside",
        "<= 0",
    ]


def test_the_github_job_runs_as_printed(checkout: Path) -> None:
    (job,) = blocks("ci.md", "yaml")
    (dump,) = re.findall(r"^      DUMP: (\S+)$", job, re.MULTILINE)
    lines = re.findall(r"^      - run: (.*)$", job, re.MULTILINE)
    assert lines[0] == "pip install ."  # this very package, which the tests run on
    env = os.environ | {"DUMP": dump, "GITHUB_STEP_SUMMARY": str(checkout / "summary.md")}
    for line in lines[1:]:
        script = f'rollout-is() {{ {shlex.quote(sys.executable)} -m rollout_is "$@"; }}\n{line}'
        done = subprocess.run(
            ["bash", "-ec", script], cwd=checkout, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "summary.md").read_text().startswith("## rollout-is check")
    assert (checkout / "rollout-is.xml").is_file()


def test_the_pytest_module_runs_as_printed(pytester: pytest.Pytester) -> None:
    (module,) = blocks("ci.md", "python")
    (failure,) = blocks("ci.md", "text")
    steps = {step: 0.01 for step in (1, 2, 3, 4)}
    write_dump(pytester.path / "dumps" / "smoke", steps)
    limits = ["-o", "main.json", "--limits-out", "rollout-is.toml", "-q"]
    assert main(["baseline", "dumps/smoke", *limits]) == 0
    pytester.makepyfile(module)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    write_dump(pytester.path / "dumps" / "stale", steps | {3: 0.16, 4: 0.16})
    pytester.makepyfile(module.replace("dumps/smoke", "dumps/stale"))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=2)
    # the same lines, figures apart
    printed = re.sub(r"[0-9.]+", "N", result.stdout.str())
    for line in failure.splitlines():
        assert re.sub(r"[0-9.]+", "N", line) in printed, line
