"""A result reaches its file whole or not at all, and never over another one unasked."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_is.cli.output import check_output, write_result
from rollout_is.dumps.errors import UsageError


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.txt"
    write_result("größe\n", target)
    assert target.read_bytes() == "größe\n".encode()
    assert os.listdir(tmp_path) == ["report.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask


def test_an_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    target = tmp_path / "report.txt"
    target.write_text("old")
    with pytest.raises(UsageError, match="expected a new file, found an existing one") as error:
        write_result("new", target)
    assert error.value.exit_code == 2 and "--force" in error.value.fix
    assert target.read_text() == "old"
    write_result("new", target, force=True)
    assert target.read_text() == "new"


@pytest.mark.parametrize(("where", "words"), [("", "found a folder"), ("missing/report.txt", "found none")])
def test_no_place_for_it(tmp_path: Path, where: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_output(tmp_path / where, force=True)


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere: the question itself is answered here
    with pytest.raises(UsageError, match="read-only"):
        check_output(tmp_path / "report.txt", force=False)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.txt"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_result("new", target, force=True)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_stdout_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    write_result("text\n")
    assert capsys.readouterr().out == "text\n"


def test_a_name_that_stdout_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    write_result("größe \udcff\n")
    assert raw.getvalue() == b"gr\\xf6\\xdfe \\udcff\n"
    write_result("größe \udcff\n", tmp_path / "report")
    assert (tmp_path / "report").read_text(encoding="utf-8") == "größe \\udcff\n"


def test_a_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    check_output(Path("-"), force=False)
    write_result("figures\n", Path("-"))
    assert capsys.readouterr().out == "figures\n" and os.listdir(tmp_path) == []


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_output(pipe, force=False)
        write_result("figures\n", pipe)
        assert os.read(reader, 100) == b"figures\n" and pipe.is_fifo()
    finally:
        os.close(reader)
    write_result("figures\n", Path(os.devnull))
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["explain", "mismatch_kl"]])
def test_a_closed_or_full_stdout_is_no_bug(argv: list[str]) -> None:
    command = f"exec {sys.executable} -m rollout_is {' '.join(argv)}"
    closed = subprocess.run(
        ["bash", "-c", f"{command} >&-"], check=False, stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert closed.returncode == 2 and "found it closed" in closed.stderr, closed.stderr
    if os.path.exists("/dev/full"):
        full = subprocess.run(
            ["bash", "-c", f"{command} >/dev/full"], check=False, stderr=subprocess.PIPE, text=True, timeout=60
        )
        assert full.returncode == 2 and "No space left" in full.stderr, full.stderr
