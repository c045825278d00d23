"""Limits from TOML: every spelling, every line, and every mistake named where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_is.analysis.gate.baseline import limits_toml
from rollout_is.analysis.gate.config import find_config, limits_from_mapping, load_config
from rollout_is.analysis.gate.limits import Limit, MaxChange, Origin, PerStep
from rollout_is.analysis.summary import Summary
from rollout_is.dumps.errors import UsageError


def write(folder: Path, text: str, name: str = "rollout-is.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key_is_read_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
# our limits
baseline = "main.json"

[limits]
"masked.mismatch.mismatch_k3_kl" = { max = 1e-3, reason = "NeMo guide" }
"masked.token.rollout_is_mean" = [
  { min = 0.98, max = 1.02 },
  { min = 0.9, max = 1.1, per_step = "any", severity = "warning" },
]
masked.mismatch.mismatch_logprob_abs_diff = { max_change = { relative = 0.5, absolute = 1e-4, direction = "increase" } }
"masked.mismatch.mismatch_kl" = { max_change = "50 %", per_step = { share = 0.1 } }

[limits.coverage.nonfinite_valid_tokens]
max = 0
""",
    )
    config = load_config(path)
    found = {(limit.statistic, limit.per_step): limit for limit in config.limits}
    assert config.baseline == str(tmp_path / "main.json")
    assert len(found) == 6
    k3 = found["masked.mismatch.mismatch_k3_kl", None]
    assert (k3.max, k3.min, k3.origin, k3.reason) == (1e-3, None, Origin(str(path), 5), "NeMo guide")
    mean = found["masked.token.rollout_is_mean", None]
    assert (mean.min, mean.max, mean.origin.line, mean.severity) == (0.98, 1.02, 7, "error")
    stepwise = found["masked.token.rollout_is_mean", PerStep("any")]
    assert (stepwise.severity, stepwise.origin.line) == ("warning", 8)
    change = found["masked.mismatch.mismatch_logprob_abs_diff", None]
    assert change.max_change == MaxChange(0.5, 1e-4, "increase")
    assert change.origin.line == 10
    assert found["masked.mismatch.mismatch_kl", PerStep("share", 0.1)].max_change == MaxChange(relative=0.5)
    nonfinite = found["coverage.nonfinite_valid_tokens", None]
    assert (nonfinite.max, nonfinite.origin.line) == (0.0, 13)


def test_pyproject_table_and_nothing_else_of_it(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[project]\nname = "x"\n\n[tool.rollout-is]\nbuiltin = false\n\n[tool.rollout-is.limits]\n"coverage.sequences" = { min = 8 }\n',
        "pyproject.toml",
    )
    config = load_config(path)
    assert [(limit.statistic, limit.min, limit.origin.line) for limit in config.limits] == [
        ("coverage.sequences", 8.0, 8)
    ]
    assert config.builtin is False


def test_multi_line_strings_do_not_shift_or_fake_lines(tmp_path: Path) -> None:
    text = '[limits]\n"coverage.sequences" = { min = 1, reason = """\n"coverage.positions" = no\n""" }\n"coverage.positions" = { min = 2 }\n'
    config = load_config(write(tmp_path, text))
    assert {limit.statistic: limit.origin.line for limit in config.limits} == {
        "coverage.sequences": 2,
        "coverage.positions": 5,
    }


@pytest.mark.parametrize(
    ("body", "line", "says"),
    [
        ('"a.b.c" = { maxx = 1 }', 2, "did you mean 'max'?"),
        ('"a.b.c" = { max = "1" }', 2, "max: expected a finite number, found '1'"),
        ('"a.b.c" = { max = true }', 2, "max: expected a finite number, found True"),
        ('"a.b.c" = { max = nan }', 2, "expected a finite number, found nan"),
        ('"a.b.c" = { min = inf }', 2, "expected a finite number, found inf"),
        ('"a.b.c" = 0.1', 2, '"a.b.c" = { max = 0.1 }'),
        ('"a.b.c" = {}', 2, "at least one of min, max, max_change"),
        ('"a.b.c" = { severity = "error" }', 2, "at least one of min, max, max_change"),
        ('"a.b.c" = { min = 2, max = 1 }', 2, "min 2.0 and max 1.0"),
        ('"a.b.c" = { max = 1, severity = "fatal" }', 2, "'fatal'"),
        ('"a.b.c" = { max = 1, per_step = "lasst" }', 2, "did you mean 'last'?"),
        ('"a.b.c" = { max = 1, per_step = { share = 1.0 } }', 2, "share of steps in [0, 1)"),
        ('"a.b.c" = { max = 1, per_step = { part = 0.1 } }', 2, "unknown key 'part'"),
        ('"a.b.c" = { max_change = 0.5 }', 2, "{ relative = 0.5 } or { absolute = 0.5 }"),
        ('"a.b.c" = { max_change = "half %" }', 2, "expected a percentage"),
        ('"a.b.c" = { max_change = { relative = -1 } }', 2, "a number >= 0"),
        ('"a.b.c" = { max_change = { direction = "both" } }', 2, "relative, absolute or both"),
        ('"a.b.c" = { max_change = { relative = 1, direction = "up" } }', 2, "one of both, increase, decrease"),
        ('"x.y.z" = { max = 1 }\n"a.b.c" = [1]', 3, "expected a table"),
    ],
)
def test_each_mistake_is_named_with_its_line(tmp_path: Path, body: str, line: int, says: str) -> None:
    path = write(tmp_path, f"[limits]\n{body}\n")
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert caught.value.where == f"{path}:{line}"
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["limit = {}\n", "baseline = 3\n[limits]\n", 'builtin = "no"\n'])
def test_top_level_mistakes(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        load_config(write(tmp_path, text))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_config(tmp_path / "none.toml")
    broken = write(tmp_path, "[limits]\nx = = 1\n")
    with pytest.raises(UsageError) as caught:
        load_config(broken)
    assert caught.value.where == f"{broken}:2"
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        load_config(binary)


def test_the_nearest_file_wins_and_a_pyproject_without_our_table_is_passed_over(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    top = write(tmp_path, '[tool.rollout-is.limits]\n"coverage.sequences" = { min = 1 }\n', "pyproject.toml")
    write(inner, "[tool.other]\n", "pyproject.toml")
    assert find_config(inner) == top
    own = write(tmp_path / "a", "[limits]\n")
    assert find_config(inner) == own


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    limits = (
        Limit("masked.token.rollout_is_mean", 0.9, 1.1, None, PerStep("share", 0.25), "warning", reason='a "b" \\ c'),
        Limit("masked.mismatch.mismatch_k3_kl", max_change=MaxChange(0.5, 2.6e-7)),
        Limit("masked.mismatch.mismatch_k3_kl", max_change=MaxChange(None, 1e-5, "decrease"), per_step=PerStep("any")),
    )
    path = write(tmp_path, limits_toml(limits, Summary({}, {}, {}, {}), "runs/main.json"))
    config = load_config(path)

    def plain(limit: Limit) -> tuple[object, ...]:
        return (limit.statistic, limit.min, limit.max, limit.max_change, limit.per_step, limit.severity, limit.reason)

    assert [plain(limit) for limit in config.limits] == [plain(limit) for limit in limits]
    assert config.baseline == str(tmp_path / "runs" / "main.json")


def test_limits_in_code_take_the_same_shape() -> None:
    (limit,) = limits_from_mapping({"masked": {"token": {"rollout_is_mean": {"min": 0.9}}}})
    assert (limit.statistic, limit.min, str(limit.origin)) == ("masked.token.rollout_is_mean", 0.9, "given in code")
    with pytest.raises(UsageError, match="did you mean 'max'"):
        limits_from_mapping({"coverage.sequences": {"maxi": 1}})
