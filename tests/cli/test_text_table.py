"""A number is never cut: columns go instead, in their fixed order, and the table says which."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_is.cli.render.table import Cell, Column, Table, cell
from rollout_is.cli.render.terminal import Terminal
from rollout_is.cli.render.text import fits, printable, render, shorten, text_width


def table(rows: list[list[str]], drops: tuple[int, ...] = (0, 2, 1)) -> Table:
    columns = (Column("name", "left"), *(Column(f"c{k}", drop=drop) for k, drop in enumerate(drops)))
    return Table("title", columns, tuple(tuple(cell(text) for text in row) for row in rows))


def test_a_column_goes_by_its_order_and_is_named() -> None:
    wide = table([["statistic", "1.00e-10", "2.00e-10", "3.00e-10"]])
    assert fits(wide, 40)
    text = render(wide, Terminal(34))
    assert "1.00e-10" in text and "3.00e-10" in text and "2.00e-10" not in text
    assert "left out at this width: c1" in text
    assert "left out at this width: c1, c2" in " ".join(render(wide, Terminal(20)).split())


@given(
    rows=st.lists(
        st.lists(st.floats(allow_nan=False).map(lambda x: f"{x:.2e}"), min_size=3, max_size=3), min_size=1, max_size=5
    ),
    width=st.integers(10, 60),
)
def test_numbers_are_whole_at_any_width(rows: list[list[str]], width: int) -> None:
    shown = render(table([["n", *row] for row in rows]), Terminal(width))
    left_out = re.findall(r"c\d", shown.partition("left out")[2])
    body = [line.split()[1:] for line in shown.splitlines() if line.split()[:1] == ["n"]]
    assert body == [[text for k, text in enumerate(row) if f"c{k}" not in left_out] for row in rows]


def test_groups_stand_above_their_columns() -> None:
    columns = (Column("s", "left"), Column("a", group="token"), Column("b", group="token"), Column("c", group="seq"))
    lines = render(
        Table("", columns, ((cell("x"), cell("1.00"), cell("2.00"), cell("3.00")),)), Terminal()
    ).splitlines()
    assert lines[0] == "    ─ token ─    seq"
    assert lines[2] == "x   1.00 2.00   3.00"


@pytest.mark.parametrize("width", [30, 60, 100])
def test_free_text_is_broken_not_lost(width: int) -> None:
    words = "positive: rollout more confident in its sampled tokens than train"
    columns = (Column("name", "left"), Column("x"), Column("meaning", "left", wrap=True))
    text = render(Table("", columns, ((cell("kl"), cell("0.18"), cell(words)),)), Terminal(width))
    # read column by column: the words come back in order
    assert " ".join(text.split()).replace("kl 0.18 ", "").endswith(words.split()[-1])
    assert all(word in text for word in words.split())
    assert max(map(len, text.splitlines())) <= max(width, 36)


def test_long_names_are_shortened_in_the_middle_and_numbers_are_not() -> None:
    columns = (Column("shard", "left"), Column("x"))
    text = render(Table("", columns, ((cell("a" * 40 + "z"), cell("-1.23e-10")),)), Terminal(30))
    assert "-1.23e-10" in text and "…" in text and text.splitlines()[1].split()[0].endswith("z")
    assert max(map(len, text.splitlines())) <= 30


def test_escape_sequences_in_a_name_are_not_obeyed() -> None:
    evil = "\x1b[31mred\x07\u202egpj\u2066"
    text = render(Table("", (Column("shard", "left"),), ((cell(evil),),)), Terminal())
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "\\x1b[31mred" in text
    assert printable("plain ä 漢") == "plain ä 漢"


def test_wide_characters_keep_columns_aligned() -> None:
    columns = (Column("shard", "left"), Column("x"))
    rows = ((cell("漢字"), cell("1.00")), (cell("abcd"), cell("1.00")))
    lines = render(Table("", columns, rows), Terminal()).splitlines()
    assert text_width(lines[1]) == text_width(lines[2])
    assert text_width(shorten("漢" * 20, 11)) <= 11


def test_colour_adds_codes_and_changes_no_letter() -> None:
    painted = Table("T", (Column("name", "left"),), ((Cell("bad one", None, "bad"),),))
    plain, colour = render(painted, Terminal()), render(painted, Terminal(color=True))
    assert colour != plain
    assert re.sub(r"\x1b\[\d*m", "", colour) == plain


def test_ascii_when_the_encoding_needs_it() -> None:
    columns = (Column("s", "left"), Column("± masked", group="token"), Column("b", group="token"))
    text = render(Table("ä → b", columns, ((cell("x"), cell("1.00"), cell("2.00")),)), Terminal(unicode=False))
    assert text.isascii()


def test_a_row_of_the_wrong_length_is_a_bug_that_is_told() -> None:
    with pytest.raises(ValueError, match="expected 1 cells in a row, found 2"):
        Table("T", (Column("a"),), ((cell("1"), cell("2")),))
