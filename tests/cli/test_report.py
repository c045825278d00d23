"""Table, JSON, CSV and Markdown read the same stored numbers; the table says the verdict first."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_is.analysis.findings import findings
from rollout_is.analysis.summary import Finding, Group, Statistic, Summary
from rollout_is.cli.app import main
from rollout_is.cli.render import report
from rollout_is.cli.render.footnotes import note_lines
from rollout_is.cli.render.numbers import figure
from rollout_is.cli.render.terminal import Terminal
from rollout_is.cli.render.worst import worst_tables
from rollout_is.dumps.notes import Note

Make = Callable[..., Summary]


def text_of(summary: Summary, width: int = 100, **terminal: bool) -> str:
    return report.to_text(summary, Terminal(width, **terminal))


def paragraphs(text: str) -> list[str]:
    return text.split("\n\n")


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_the_order_is_verdict_header_padding_tables_footnotes(make_summary: Make) -> None:
    summary = make_summary()
    parts = paragraphs(text_of(replace(summary, findings=findings(summary))))
    starts = [part.split()[0] for part in parts]
    assert starts[0] in ("ok:", "1.")
    assert starts[1] == "dump"
    assert parts[2].startswith("padding: 1 pad segment would be counted as sequences: rollout_is_seq_min 0 -> 0.654")
    assert parts[3].startswith("per sequence")
    assert parts[-1].startswith("[1]")


def test_views_stand_side_by_side_and_agreement_is_said_once(make_summary: Make) -> None:
    text = text_of(make_summary(), 160)
    assert row(text, "rollout_is_seq_min") == ["rollout_is_seq_min", "0.654", "0", "0.654"]
    assert row(text, "rollout_is_mean")[1:4] == ["1.35", "=", "1.35"]
    assert row(text, "mismatch_kl")[1:4] == ["0.180", "=", "0.180"]


def test_the_number_is_printed_where_its_equal_is_not_shown(make_summary: Make) -> None:
    only = report.choose(make_summary(), ("padded",), ("token",))
    assert row(text_of(only), "rollout_is_mean")[1:] == ["1.35"]


def test_null_is_a_dash_with_its_reason_once(make_summary: Make) -> None:
    text = text_of(make_summary())
    assert text.count("not computed here") == 2  # the veto table says it in its title, the footnote for all others
    assert "-[1]" in text and "[1] not computed here" in text
    assert "nan" not in text.lower() and "None" not in text


def test_a_value_beyond_float64_is_shown_as_its_log(make_summary: Make) -> None:
    summary = make_summary()
    masked = {section: dict(names) for section, names in summary.views["masked"].items()}
    masked["sequence"]["rollout_is_min"] = Statistic(None, 2, None, "below float64", -7503.9, True)
    text = text_of(replace(summary, views={**summary.views, "masked": masked}))
    assert "exp(-7504)" in text


def test_all_formats_hold_the_same_numbers(make_summary: Make) -> None:
    summary = make_summary()
    data = json.loads(summary.to_json())
    rows = {line["id"]: line for line in csv.DictReader(io.StringIO(report.to_csv(summary)))}
    text, markdown = text_of(summary, 160), report.to_md(summary)
    for path, statistic in summary.statistics():
        view, section, name = path.split(".")
        stored = data["views"][view][section][name]
        assert stored["value"] == statistic.value
        assert rows[path]["value"] == ("" if statistic.value is None else repr(statistic.value))
        assert float(rows[path]["n"]) == statistic.n
        assert rows[path]["why"] == (statistic.why or "")
        if statistic.value is not None:
            assert figure(statistic.value) in text and figure(statistic.value) in markdown
    assert rows["coverage.valid_tokens"]["value"] == "5"
    assert rows["groups.rank.0.masked.mismatch.mismatch_kl"]["value"] == "0.18"


def test_csv_has_the_stated_columns_and_one_row_an_id(make_summary: Make) -> None:
    lines = report.to_csv(make_summary()).splitlines()
    assert lines[0] == "id,value,n,stderr,log_value,why"
    keys = [line.split(",")[0] for line in lines]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(make_summary: Make, width: int) -> None:
    summary = make_summary()
    text = text_of(replace(summary, findings=findings(summary)), width)
    wide = [line for line in text.splitlines() if len(line) > width and "next:" not in line]
    assert wide == []


def test_at_most_five_findings_worst_first(make_summary: Make) -> None:
    many = tuple(Finding(f"id{k}", "warning" if k else "error", f"message {k}", source="s", next="n") for k in range(7))
    text = text_of(make_summary(findings=tuple(reversed(many))))
    assert text.startswith("1. error: message 0")
    assert "5. warning" in text and "6. warning" not in text
    assert "and 2 more" in text


def test_one_line_when_all_is_well(make_summary: Make) -> None:
    assert paragraphs(text_of(make_summary()))[0] == "ok: nothing wrong found in 5 valid tokens of 2 sequences"


def test_notes_once_each_worst_first_ten_of_a_kind() -> None:
    notes = [Note("copy", "info", f"shard {k}", f"shard {k} is a copy") for k in range(12)]
    lines = note_lines((*notes, *notes, Note("bad", "error", "", "worst")))
    assert lines[0] == ("error", "worst")
    assert len(lines) == 12 and lines[-1] == ("info", "... and 2 more of copy")


def test_groups_are_worst_first_or_in_order(make_summary: Make) -> None:
    def group(value: float) -> Group:
        statistic = Statistic(value, 5)
        return Group({"masked": {"mismatch": {"mismatch_logprob_abs_diff": statistic}}}, 6, 5, 2)

    values = {"0": 0.01, "1": 0.3, "2": 0.02}
    summary = make_summary(groups={by: {k: group(v) for k, v in values.items()} for by in ("rank", "step")}, worst={})
    ranks, steps = report.tables(summary, report.Footnotes(), 100)[-2:]
    assert [line[0].text for line in ranks.rows] == ["1", "2", "0"] and "worst abs diff first" in ranks.title
    assert "rank 1 has 20.0 times the median abs diff of the others" in ranks.remarks
    assert [line[0].text for line in steps.rows] == ["0", "1", "2"]
    assert steps.remarks[-1] == "abs diff over steps: ▁█▁  0.0100 to 0.300"


def test_a_thousand_groups_are_counted_not_listed(make_summary: Make) -> None:
    group = Group({"masked": {}}, 6, 5, 2)
    summary = make_summary(groups={"shard": {f"s{k:04d}": group for k in range(1000)}})
    text = text_of(summary)
    assert "980 more not shown" in text
    assert sum(line.startswith("s0") for line in text.splitlines()) == 20


def test_markdown_means_what_it_says_even_with_hostile_names(make_summary: Make) -> None:
    summary = make_summary(source={"path": "a|b`<script>`"}, notes=(Note("x", "info", "", "a | b\n# not a heading"),))
    text = report.to_md(summary)
    assert "<script>" not in text.replace("\\<script>", "")
    assert "\n# not a heading" not in text


def saved(tmp_path: Path, summary: Summary) -> str:
    path = tmp_path / "saved.json"
    path.write_text(summary.to_json())
    return str(path)


def test_a_saved_summary_is_shown_again_without_torch(make_summary: Make, tmp_path: Path) -> None:
    summary, out = make_summary(), io.StringIO()
    assert main(["analyze", saved(tmp_path, summary), "--format", "json"], stdout=out) == 0
    again = json.loads(out.getvalue())
    assert again["views"] == json.loads(summary.to_json())["views"]
    assert [f["id"] for f in again["findings"]] == [f.id for f in findings(summary)]


@pytest.mark.parametrize("option", [["--upper", "3"], ["--by", "step"], ["--steps", "1"], ["--column", "train=a"]])
def test_a_saved_summary_cannot_be_computed_again(make_summary: Make, tmp_path: Path, option: list[str]) -> None:
    err = io.StringIO()
    assert main(["analyze", saved(tmp_path, make_summary()), *option], stderr=err) == 2
    assert "figures, not tokens" in err.getvalue()


def test_nothing_valid_exits_with_one(make_summary: Make, tmp_path: Path) -> None:
    out = io.StringIO()
    nothing = make_summary(coverage={"valid_tokens": 0, "sequences": 0})
    assert main(["analyze", saved(tmp_path, nothing)], stdout=out) == 1
    assert out.getvalue().startswith("1. error: no valid tokens")


def test_views_and_levels_can_be_chosen(make_summary: Make, tmp_path: Path) -> None:
    out = io.StringIO()
    argv = [
        "analyze",
        saved(tmp_path, make_summary()),
        "--view",
        "masked,padded",
        "--level",
        "geometric",
        "--format",
        "csv",
    ]
    assert main(argv, stdout=out) == 0
    keys = [line.split(",")[0] for line in out.getvalue().splitlines()]
    assert "masked.geometric.rollout_is_mean" in keys and "padded.mismatch.mismatch_kl" in keys
    assert not [key for key in keys if key.startswith("unmasked.") or ".token." in key]


def test_a_report_goes_into_a_file_only_when_asked_to_replace_it(make_summary: Make, tmp_path: Path) -> None:
    path, target = saved(tmp_path, make_summary()), tmp_path / "report.md"
    assert main(["analyze", path, "--format", "markdown", "-o", str(target)]) == 0
    before, err = target.read_text(), io.StringIO()
    assert before.startswith("# rollout-is")
    assert main(["analyze", path, "-o", str(target)], stderr=err) == 2
    assert target.read_text() == before and "--force" in err.getvalue()
    assert main(["analyze", path, "-o", str(target), "--force", "--color", "always"]) == 0
    assert "\x1b" not in target.read_text()


def test_a_place_or_a_difference_of_0_is_shown(make_summary: Make) -> None:
    token = {"shard": "a", "rank": 0, "sequence": 0, "position": 0, "index": 0, "log_ratio": 0.0, "token_id": None}
    sequence = {"shard": "a", "sequence": 0, "mean_abs_log_ratio": 0.0, "nonfinite_tokens": 0}
    tables = worst_tables(make_summary(worst={"sequences": [sequence], "tokens": [token]}))
    assert [column.header for column in tables[0].columns] == ["shard", "sequence", "mean |d|"]
    assert [column.header for column in tables[1].columns] == ["shard", "rank", "sequence", "position", "index", "d"]
