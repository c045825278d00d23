"""``sweep`` from the command line: the table, the formats, the front, the steps, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch

from rollout_is.cli.app import main
from rollout_is.dumps.writer import DumpWriter


def run(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(["sweep", *args], stdout=out, stderr=err), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two steps; the second far off policy."""
    folder = tmp_path_factory.mktemp("sweep") / "dump"
    generator = torch.Generator().manual_seed(5)
    with DumpWriter(folder) as writer:
        for step, spread in ((1, 0.02), (2, 0.6)):
            rollout = -torch.rand(600, generator=generator) * 2 - 0.1
            train = (rollout + spread * torch.randn(600, generator=generator)).clamp(max=0.0)
            writer.write(
                step=step,
                train_logprobs=train,
                rollout_logprobs=rollout,
                response_mask=torch.arange(600) % 30 >= 5,
                cu_seqlens=torch.arange(0, 601, 30),
            )
    return str(folder)


def test_the_default_table_names_each_policy_once_and_marks_the_front(dump: str) -> None:
    code, out, err = run(dump)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    for name in ("verl/token_tis", "xtuner/both", "icepop", "trl/sequence_mask", "none"):
        assert sum(line[2:].split(" ")[0] == name for line in out.splitlines()) == 1
    assert any(line.startswith("* ") for line in out.splitlines())
    assert "leaves n" in out and "stays in n with weight 0" in out


def test_json_holds_counts_figures_rules_and_the_front(dump: str) -> None:
    code, out, _ = run(dump, "--policy", "icepop", "--policy", "none", "--policy", "verl/geo_rs", "--format", "json")
    data = json.loads(out)
    assert code == 0 and data["schema"] == "rollout-is/sweep/1"
    by_name = {p["name"]: p for p in data["policies"]}
    assert set(by_name) == {"icepop", "none", "verl/geo_rs"}
    assert by_name["none"]["total"]["counts"]["tokens"] == 1000
    assert by_name["none"]["front"] is False
    assert by_name["icepop"]["rejected"] == "stays in n as 0"
    assert by_name["verl/geo_rs"]["rejected"] == "leaves n"
    assert by_name["verl/geo_rs"]["total"]["by_rule"][0]["tokens"] > 0
    assert "steps" not in by_name["icepop"]


def test_by_step_shows_the_step_that_went_wrong(dump: str) -> None:
    code, out, _ = run(dump, "--policy", "token:mask:lower=0.8,upper=1.25", "--by", "step", "--format", "json")
    steps = json.loads(out)["policies"][0]["steps"]
    assert code == 0 and list(steps) == ["1", "2"]
    first, second = (steps[s]["figures"]["rejected_token_fraction"]["value"] for s in ("1", "2"))
    assert first == 0.0 and second > 0.5
    table = run(dump, "--policy", "icepop", "--by", "step")[1]
    assert "icepop * by step" in table


def test_a_grid_is_every_level_with_every_action_and_bound(dump: str) -> None:
    args = ("--level", "token,geometric", "--action", "truncate,mask", "--bounds", "0.5:2", "--bounds", "0.9:1.1")
    code, out, _ = run(dump, *args, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len({row["policy"] for row in rows}) == 8
    assert {row["figure"] for row in rows} >= {"ess_kept", "mean", "front", "tokens_masked"}


def test_markdown_is_a_table(dump: str) -> None:
    code, out, _ = run(dump, "--policy", "icepop", "-f", "markdown")
    assert code == 0 and out.startswith("# rollout-is sweep") and "| \\* icepop | 0 |" in out


def test_figures_do_not_depend_on_workers_or_company(dump: str) -> None:
    one = json.loads(run(dump, "--policy", "slime/mis", "-f", "json", "--workers", "1", "--by", "step")[1])
    two = json.loads(run(dump, "--policy", "slime/mis", "-f", "json", "--workers", "2", "--by", "step")[1])
    assert one["policies"] == two["policies"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--policy", "verl/token_tus"), "did you mean verl/token_tis?"),
        (("--policy", "token:truncate:upper=-1"), "expected a finite ratio > 0, found -1"),
        (("--policy", "token:mask:lower=1.2,upper=0.8"), "expected lower < upper, found lower 1.2 and upper 0.8"),
        (("--policy", "xtuner/both:lower=5,upper=0.5"), "expected lower < upper, found lower 5 and upper 0.5"),
        (("--policy", "token:cap:upper=2"), "expected one of truncate, clip, raw, zero, mask, found 'cap'"),
        (("--policy", "token:truncate:2"), "bounds are named: lower=, upper="),
        (("--policy", "icepop", "--policy", "icepop"), "expected each policy once"),
        (("--bounds", "2:0.5"), "the bounds are reversed"),
        (("--level", "word"), "expected one of token, sequence, geometric"),
        (("--by", "rank"), "expected step, found 'rank'"),
        (("--policy", "veto:lower=0"), "expected a finite ratio > 0, found 0"),
    ],
)
def test_wrong_usage_is_refused_with_both_sides(dump: str, args: tuple[str, ...], message: str) -> None:
    code, out, err = run(dump, *args)
    assert (code, out) == (2, "")
    assert message in err


def test_a_policy_that_needs_advantages_says_so(dump: str) -> None:
    code, out, err = run(dump, "--policy", "deepseek/off-policy-mask")
    assert (code, out) == (3, "")
    assert "expected a column advantages [T], found none" in err and "deepseek/off-policy-mask rejects" in err


def test_nothing_valid_is_exit_1_with_reasons(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "d") as writer:
        zeros = torch.zeros(4)
        writer.write(
            step=1, train_logprobs=zeros, rollout_logprobs=zeros, response_mask=zeros, cu_seqlens=torch.tensor([0, 4])
        )
    code, out, _ = run(str(tmp_path / "d"), "--policy", "icepop", "-f", "json")
    figures = json.loads(out)["policies"][0]["total"]["figures"]
    assert code == 1
    assert all(f["value"] is None and f["why"] == "no valid tokens" for f in figures.values())
