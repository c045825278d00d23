"""Width, colour and characters from the stream and the environment."""

from __future__ import annotations

import io

import pytest

from rollout_is.cli.render.terminal import Terminal, detect


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("tty", "choice", "environ", "expected"),
    [
        (True, "auto", {}, True),
        (False, "auto", {}, False),
        (True, "auto", {"TERM": "dumb"}, False),
        (True, "auto", {"NO_COLOR": "1"}, False),
        (True, "auto", {"NO_COLOR": ""}, True),
        (False, "auto", {"FORCE_COLOR": "1"}, True),
        (True, "auto", {"FORCE_COLOR": "0"}, False),
        (True, "auto", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (False, "auto", {"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        (False, "always", {"NO_COLOR": "1"}, True),
        (True, "never", {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour(tty: bool, choice: str, environ: dict[str, str], expected: bool) -> None:
    assert detect(Tty() if tty else io.StringIO(), choice, environ).color is expected


@pytest.mark.parametrize(
    ("columns", "width"), [("60", 60), ("160", 160), ("1", 40), ("100000", 200), ("", 100), ("x", 100), ("-5", 100)]
)
def test_width_comes_from_columns_within_reason(columns: str, width: int) -> None:
    assert detect(io.StringIO(), environ={"COLUMNS": columns}).width == width


@pytest.mark.parametrize(
    ("encoding", "unicode"), [("utf-8", True), ("ascii", False), ("latin-1", False), ("cp1252", False)]
)
def test_characters_follow_the_encoding(encoding: str, unicode: bool) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert detect(stream, environ={}).unicode is unicode


def test_a_closed_stream_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    assert detect(stream, environ={}) == Terminal(100, color=False, unicode=True)


def test_plain_leaves_no_letter_that_cannot_be_shown() -> None:
    assert Terminal(unicode=False).plain("± 0.1 → ä") == "+- 0.1 -> \\xe4"
