"""The progress bar: on a terminal only, after a second only, gone at the end."""

from __future__ import annotations

import io
import sys

import pytest

from rollout_is.cli import progress as module
from rollout_is.cli.progress import Progress


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def drawn(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], stream: io.StringIO, seconds: float, **more: bool
) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(**more) as progress:
        clock[0] += seconds
        progress(3_000_000, 12_000_000)
        drawn_inside = stream.getvalue()
    if drawn_inside:
        # wiped: the last thing written leaves the cursor on an empty line
        assert stream.getvalue().endswith("\r") and stream.getvalue().split("\r")[-2].strip() == ""
    return drawn_inside


def test_a_long_run_on_a_terminal_shows_its_share(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    assert " 25% of 12 million positions, 6 s left" in drawn(monkeypatch, clock, Tty(), 2.0)


@pytest.mark.parametrize(
    ("stream", "seconds", "enabled"), [(Tty(), 0.9, True), (io.StringIO(), 9.0, True), (Tty(), 9.0, False)]
)
def test_nothing_is_drawn_elsewhere(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], stream: io.StringIO, seconds: float, enabled: bool
) -> None:
    assert drawn(monkeypatch, clock, stream, seconds, enabled=enabled) == ""


def test_a_rank_other_than_0_is_silent(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    assert drawn(monkeypatch, clock, Tty(), 9.0) == ""


def test_it_is_not_drawn_for_every_call(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        clock[0] += 2.0
        for done in range(1000):
            progress(done, 1000)
        assert stream.getvalue().count("\r") == 1


def test_an_empty_dump_divides_by_nothing(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        clock[0] += 2.0
        progress(0, 0)
        assert "0% of 0 positions" in stream.getvalue()
