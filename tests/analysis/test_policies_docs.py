"""docs/policies.md and docs/profiles.md say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_is.analysis.policies import PRESETS, explain_policy
from rollout_is.analysis.policies.spec import parse_spec
from rollout_is.analysis.profiles import KNOWN, parse
from rollout_is.dumps.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_stands_in_the_table_with_its_rule_and_oddity(name: str) -> None:
    page = explain_policy(name)
    line = next(x for x in (DOCS / "policies.md").read_text().splitlines() if x.startswith(f"| `{name}` |"))
    rules = page["rule"]
    assert isinstance(rules, list) and all(rule.replace("|", "\\|") in line for rule in rules)
    assert str(page["default"]) in line and str(page["oddity"]) in line


def test_each_profile_is_listed_with_its_snapshot() -> None:
    text = (DOCS / "profiles.md").read_text()
    for name, known in KNOWN.items():
        assert f"| `{name}` | {known.source} |" in text


def test_the_settings_of_the_examples_are_understood() -> None:
    assert parse("xtuner:rollout_is_threshold=[5.0,0.5],rollout_is_mode=both").settings["rollout_is_mode"] == "both"


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "token",
        "token:",
        "token:truncate",
        "token:truncate:lower=0.5,upper=2",
        "token:clip:upper=2",
        "mean.k3:truncate:upper=2",
        "token:mask",
        "token:mask:upper=two",
        "token:truncate:upper=2+sequence:truncate:upper=2",
        "word:mask:upper=2",
        "token:mask:upper=2,shape=round",
        "token:mask:upper=2,advantage=positive",
        "token:truncate:upper=2,normalize=shard",
        "token:mask:upper=inf",
        "token:mask:upper=nan",
    ],
)
def test_specs_that_mean_nothing_are_refused_with_a_way_out(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(spec)
    assert "expected" in caught.value.problem and caught.value.code in ("policy-spec", "policy-bounds")
