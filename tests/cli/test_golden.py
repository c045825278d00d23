"""What a terminal shows, kept as files: every command of this room at 60, 100 and 160 columns, and in every format.

``ROLLOUT_IS_REGEN=1 pytest tests/cli/test_golden.py`` writes them again; look at each before you commit it.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

from rollout_is.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
WIDTHS = (60, 100, 160)

SCREENS = {
    "analyze_packed_padding": ["analyze", "sample_dumps/packed_padding"],
    "analyze_everything": [
        *("analyze", "sample_dumps/tiny_lm", "--by", "step,rank,position", "--by", "length", "--top", "3"),
        *("--veto-lower", "0.9", "--upper", "1.1"),
    ],
    "analyze_prefill": ["analyze", "sample_dumps/tiny_lm", "--logprobs", "train,prefill", "--view", "masked"],
    "analyze_multi_turn": ["analyze", "sample_dumps/multi_turn", "--level", "token,geometric"],
    "analyze_weights_only": ["analyze", "sample_dumps/packed_padding", "--only", "weights", "--steps", "410,412:413"],
    "analyze_all_masked": ["analyze", "sample_dumps/all_masked"],
    "analyze_partial": ["analyze", "sample_dumps/broken/lengths_differ", "--allow-partial", "--view", "masked"],
    "inspect_packed_padding": ["inspect", "sample_dumps/packed_padding"],
    "inspect_tiny_lm": ["inspect", "sample_dumps/tiny_lm"],
    "inspect_lengths_differ": ["inspect", "sample_dumps/broken/lengths_differ"],
    "inspect_duplicate_rank": ["inspect", "sample_dumps/broken/duplicate_rank"],
    "explain_seq_min": ["explain", "seq_min"],
    "explain_masked_mean": ["explain", "masked.token.rollout_is_mean"],
    "explain_note": ["explain", "constant-value", "padding.counted_as_sequences"],
}
CODES = {"analyze_all_masked": 1, "inspect_lengths_differ": 3, "inspect_duplicate_rank": 3}

ONE_WIDTH = {
    "help.txt": ["--help"],
    "analyze_packed_padding.md": ["analyze", "sample_dumps/packed_padding", "--format", "markdown", "--by", "step"],
    "analyze_packed_padding.csv": ["analyze", "sample_dumps/packed_padding", "--format", "csv", "--view", "masked"],
    "inspect_packed_padding.md": ["inspect", "sample_dumps/packed_padding", "--format", "markdown"],
    "inspect_packed_padding.csv": ["inspect", "sample_dumps/packed_padding", "--format", "csv"],
    "schema.json": ["schema"],
}
ERRORS = {
    "error_lengths_differ.txt": (3, ["analyze", "sample_dumps/broken/lengths_differ"]),
    "error_two_candidates.txt": (3, ["analyze", "sample_dumps/broken/two_candidates"]),
    "error_reversed_bounds.txt": (2, ["analyze", "sample_dumps/packed_padding", "--lower", "2", "--upper", "0.5"]),
    "error_no_such_dump.txt": (3, ["analyze", "nowhere"]),
    "error_unknown_option.txt": (2, ["analyze", "sample_dumps/packed_padding", "--uper", "3"]),
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def run(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(argv, stdout=out, stderr=err)
    return code, out.getvalue(), err.getvalue()


def check(name: str, text: str) -> None:
    path = GOLDEN / name
    if name.endswith(".csv"):
        # full precision differs in its last digits between builds of torch; nine digits do not
        text = re.sub(r"-?\d+\.\d+(e[-+]?\d+)?", lambda number: f"{float(number[0]):.9g}", text)
    if os.environ.get("ROLLOUT_IS_REGEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_screen(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = run(SCREENS[name])
    assert (code, err) == (CODES.get(name, 0), "")
    check(f"{name}_{width}.txt", out)
    # A command to copy and the place of an error are one line however long; everything else fits.
    whole = re.compile(r"   next: |error: ")
    assert [line for line in out.splitlines() if len(line) > width and not whole.match(line)] == []


@pytest.mark.parametrize("name", ONE_WIDTH)
def test_format(name: str) -> None:
    code, out, err = run(ONE_WIDTH[name])
    assert (code, err) == (0, "")
    check(name, out)


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    expected, argv = ERRORS[name]
    code, out, err = run(argv)
    assert (code, out) == (expected, "")
    check(name, err)


def test_every_golden_file_is_made_by_a_test() -> None:
    made = {f"{name}_{width}.txt" for name in SCREENS for width in WIDTHS} | set(ONE_WIDTH) | set(ERRORS)
    # other commands keep theirs under their own prefix
    mine = {
        path.name for path in GOLDEN.iterdir() if re.match(r"(analyze|inspect|explain|schema|help|error)_?", path.name)
    }
    assert mine == made


def test_colour_only_paints_what_the_plain_screen_says(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["analyze", "sample_dumps/all_masked"]
    plain = run(argv)[1]
    painted = run([*argv, "--color", "always"])[1]
    assert "\x1b[31m" in painted
    assert re.sub(r"\x1b\[\d*m", "", painted) == plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(argv)[1] == painted
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(argv)[1] == plain


def test_an_ascii_terminal_gets_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    assert main(["analyze", "sample_dumps/packed_padding", "--by", "step", "--top", "2"], stdout=out) == 0
    out.flush()
    text = raw.getvalue().decode("ascii")
    assert "-- token --" in text and "+- masked" in text
