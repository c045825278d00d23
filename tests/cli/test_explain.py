"""Every name that a report prints can be explained; what is near is suggested."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from rollout_is.analysis.catalog import catalog
from rollout_is.cli.app import main
from rollout_is.cli.explain import matches
from rollout_is.cli.explanations import explanations
from rollout_is.dumps.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def explained(*argv: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    assert main(["explain", *argv], stdout=out, stderr=err) == 0, err.getvalue()
    return out.getvalue()


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("masked.token.rollout_is_mean", ["token.rollout_is_mean"]),
        ("token.rollout_is_mean", ["token.rollout_is_mean"]),
        ("rollout_is_mean", ["token.rollout_is_mean", "sequence.rollout_is_mean", "geometric.rollout_is_mean"]),
        ("mean", ["token.rollout_is_mean", "sequence.rollout_is_mean", "geometric.rollout_is_mean"]),
        ("seq_min", ["per_sequence.rollout_is_seq_min"]),
        ("kl", ["mismatch.mismatch_kl"]),
        ("coverage.nonfinite_valid_tokens", ["coverage.nonfinite_valid_tokens"]),
        ("masked", ["view.masked"]),
        ("pareto", ["sequence.pareto_k"]),
        ("weights.mean", ["weights.mean"]),
        ("mask-values", ["note.mask-values"]),
        ("catastrophic", ["veto.rollout_is_catastrophic_token_fraction"]),
    ],
)
def test_what_a_name_means(query: str, keys: list[str]) -> None:
    assert matches(query, explanations()) == keys


@pytest.mark.parametrize(
    ("query", "suggestion"),
    [
        ("rollout_is_seq_mim", "rollout_is_seq_min"),
        ("masked.token.rollout_is_maen", "rollout_is_mean"),
        ("mismatch_k4_kl", "mismatch_k3_kl"),
        ("ppl", "mismatch_training_ppl"),
    ],
)
def test_what_is_near_is_suggested(query: str, suggestion: str) -> None:
    with pytest.raises(UsageError) as error:
        matches(query, explanations())
    assert suggestion in error.value.fix


@pytest.mark.parametrize("query", ["", " ", ".", "zzzzzzzz", "../..", "a" * 5000])
def test_nonsense_is_refused(query: str) -> None:
    with pytest.raises(UsageError):
        matches(query, explanations())


def test_every_statistic_says_formula_source_and_what_to_do() -> None:
    pages = explanations()
    for entry in catalog().values():
        page = dict(pages[entry.path])
        assert {"what", "better", "high", "low", "do", "over", "pooled", "source"} <= set(page), entry.path
        if "diff" in entry.name and "abs" not in entry.name and entry.name.startswith("mismatch_log_ppl"):
            assert "more confident" in page["sign"]


def test_without_a_name_all_are_listed_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = explained()
    for entry in catalog().values():
        assert entry.name in text
    assert max(map(len, text.splitlines())) <= 60


def test_every_note_code_of_the_code_is_explained() -> None:
    pages = explanations()
    missing = []
    for room in ("analysis", "dumps"):
        for path in (ROOT / room).rglob("*.py"):
            for code in re.findall(r'\b[Nn]ote\(\s*"([a-z0-9-]+)"', path.read_text(encoding="utf-8")):
                if f"note.{code}" not in pages and len(code) > 1:
                    missing.append(f"{path.name}: {code}")
    assert not missing
