"""One place turns whatever happens into an exit code and, for a user's fault, into four lines."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable

import pytest

from rollout_is.cli import app
from rollout_is.dumps.errors import DumpError, WorkLostError


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = app.main(list(argv), stdout=out, stderr=err)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def with_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Puts a command named ``probe`` into the table."""

    def add(function: Callable[[], int]) -> None:
        module = types.ModuleType("probe_command")
        module.command = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setitem(app.COMMANDS, "probe", ("probe_command", "a probe"))

    return add


def fails_with(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


def test_every_command_of_the_table_exists_and_shows_its_help() -> None:
    for name in app.COMMANDS:
        code, out, err = run(name, "--help")
        assert (code, err) == (0, ""), name
        assert out.startswith(f"Usage: rollout-is {name}"), name


def test_the_options_of_analyze_are_in_its_help() -> None:
    out = run("analyze", "--help")[1]
    for option in [
        "--view",
        "--level",
        "--lower",
        "--upper",
        "--veto-lower",
        "--veto-upper",
        "--steps",
        "--mask",
        "--allow-partial",
        "--duplicates",
        "--by",
        "--top",
        "--column",
        "--format",
        "--output",
        "--force",
        "--device",
        "--workers",
        "--local",
        "--only",
        "--quiet",
        "--verbose",
        "--color",
        "--logprobs",
    ]:
        assert f"{option} " in out, option


def test_help_lists_the_commands_and_loads_neither_torch_nor_rich() -> None:
    script = (
        "import io, sys\n"
        "from rollout_is.cli.app import main\n"
        "out = io.StringIO()\n"
        "assert main(['--help'], stdout=out) == 0 and 'analyze' in out.getvalue()\n"
        "heavy = sorted({'torch', 'numpy', 'rich', 'typer', 'safetensors'} & set(sys.modules))\n"
        "assert not heavy, heavy\n"
        "for name in ('analyze', 'inspect', 'explain', 'schema', 'compare', 'check', 'baseline'):\n"
        "    assert main([name, '--help'], stdout=out) == 0\n"
        "assert main(['explain', 'seq_min'], stdout=out) == 0 and main(['schema'], stdout=out) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_help_answers_in_under_a_fifth_of_a_second() -> None:
    best = min(_seconds([sys.executable, "-m", "rollout_is", "--help"]) for _ in range(5))
    assert best < 0.2


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - started


def test_version() -> None:
    code, out, _ = run("--version")
    assert code == 0 and out.startswith("rollout-is ")


def test_no_command_shows_help_and_is_wrong_usage() -> None:
    code, out, _ = run()
    assert code == 2 and "Commands:" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["analyse", "x"], ["expected one of analyze", "did you mean analyze?"]),
        (["."], ["rollout-is analyze ."]),
        (["analyze"], ["Missing argument", "rollout-is analyze --help"]),
        (["analyze", "x", "--uper", "2"], ["--uper", "rollout-is analyze --help"]),
        (["analyze", "x", "--upper", "two"], ["two"]),
        (["analyze", "x", "--top", "-1"], ["-1"]),
        (["analyze", "x", "--workers", "0"], ["0"]),
        (["analyze", "x", "--format", "yaml"], ["yaml"]),
        (["analyze", "x", "--color", "green"], ["green"]),
        (["analyze", "x", "--duplicates", "oldest"], ["oldest"]),
        (["analyze", "x", "--lower", "2", "--upper", "0.5"], ["lower 2.0", "upper 0.5", "reversed"]),
        (["analyze", "x", "--upper", "nan"], ["nan"]),
        (["analyze", "x", "--upper", "0"], ["> 0"]),
        (["analyze", "x", "--veto-lower", "0"], ["veto-lower", "> 0"]),
        (["analyze", "x", "--by", "colour"], ["--by colour", "step, rank"]),
        (["analyze", "x", "--view", "hidden"], ["--view hidden", "unmasked, padded, masked, corrected"]),
        (["analyze", "x", "--level", "word"], ["--level word", "token, sequence, geometric"]),
        (["analyze", "x", "--column", "train"], ["--column train", "ROLE=NAME"]),
        (["analyze", "x", "--column", "train=a", "--column", "train=b"], ["found a and b"]),
        (["analyze", "x", "--logprobs", "train"], ["expected two different names"]),
        (["analyze", "x", "--logprobs", "a,a"], ["expected two different names"]),
        (["analyze", "x", "--only", "bars"], ["expected weights"]),
        (["analyze", "x", "-o", "."], ["expected a file, found a folder"]),
        (["explain", "nothing_like_it"], ["expected the name of a statistic"]),
        (["inspect", "x", "--steps", "9:1"], ["--steps 9:1"]),
    ],
)
def test_wrong_usage_is_two_and_says_what_is_wrong(argv: list[str], words: list[str]) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "Traceback" not in err
    assert len(err.splitlines()) <= 4
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DumpError("a.safetensors", "expected x, found y", "because", "do z"), 3),
        (WorkLostError("worker 3", "expected a result, found it killed"), 75),
        (MemoryError(), 75),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_exit_codes(with_command: Callable[[Callable[[], int]], None], error: BaseException, code: int) -> None:
    with_command(fails_with(error))
    got, out, err = run("probe")
    assert (got, out) == (code, "")
    assert "Traceback" not in err
    if isinstance(error, DumpError):
        assert err == "error: a.safetensors\n  expected x, found y\n  why: because\n  fix: do z\n"
    if isinstance(error, BrokenPipeError):
        assert err == ""


def test_a_bug_says_how_to_report_it(
    with_command: Callable[[Callable[[], int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_command(fails_with(ZeroDivisionError("oops")))
    monkeypatch.delenv("ROLLOUT_IS_DEBUG", raising=False)
    code, _, err = run("probe")
    assert code == 70
    assert "ZeroDivisionError: oops" in err and "ROLLOUT_IS_DEBUG=1" in err and "Traceback" not in err
    monkeypatch.setenv("ROLLOUT_IS_DEBUG", "1")
    assert "Traceback" in run("probe")[2]


def test_the_command_s_own_code_is_the_exit_code(with_command: Callable[[Callable[[], int]], None]) -> None:
    with_command(lambda: 1)
    assert run("probe")[0] == 1


def test_a_closed_pipe_is_silent() -> None:
    # more text than a pipe holds, to a reader that has gone
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "rollout_is", "schema"], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full to play a full disk")
def test_a_full_disk_behind_stdout_is_no_bug() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rollout_is", "schema"], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: stdout\n") and b"No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 4


def test_a_closed_stderr_does_not_change_the_exit_code() -> None:
    command = [sys.executable, "-m", "rollout_is", "analyze", "/nonexistent/dump"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert done.returncode == 3


def test_under_torchrun_rank_0_alone_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    assert run("schema") == (0, "", "")
    assert run("analyze", "x", "--by", "colour") == (2, "", "")
    monkeypatch.setenv("RANK", "0")
    assert run("schema")[1] and run("analyze", "x", "--by", "colour")[2]


def test_a_file_name_cannot_steer_the_terminal(with_command: Callable[[Callable[[], int]], None]) -> None:
    with_command(fails_with(DumpError("\x1b]0;owned\x07.safetensors", "expected x,\n    found \x1b[2J")))
    err = run("probe")[2]
    assert "\x1b" not in err and "\x07" not in err
    assert err.splitlines() == ["error: \\x1b]0;owned\\x07.safetensors", "  expected x,", "    found \\x1b[2J"]
