"""Where a result goes: stdout, or a file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rollout_is.dumps.errors import UsageError


def secondary_rank() -> bool:
    """Whether this process is a rank other than 0 of ``torchrun``: every rank computes, rank 0 alone speaks."""
    launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    return launched and os.environ["RANK"] != "0"


def check_output(path: Path | None, force: bool, option: str = "-o") -> None:
    """Refuse an output file that exists or cannot be written, before any work is done.

    Raises:
        UsageError: the file exists and ``--force`` is not given, it is a folder, or its folder is missing or read-only.
    """
    if path is None or str(path) == "-" or _is_device(path):
        return
    where = f"{option} {path}"
    if path.is_dir():
        raise UsageError(
            where, "expected a file, found a folder", fix=f"{option} {path / 'report.txt'}", code="output-folder"
        )
    if path.exists() and not force:
        raise UsageError(
            where,
            "expected a new file, found an existing one",
            "a report is never overwritten unasked",
            "choose another name, or add --force",
            code="output-exists",
        )
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(
            where, f"expected the folder {folder}, found none", fix=f"mkdir -p {folder}", code="output-folder"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            where,
            f"expected a folder that can be written, found {folder} read-only",
            fix="choose another folder",
            code="output-unwritable",
        )


def write_result(text: str, output: Path | None = None, force: bool = False, option: str = "-o") -> None:
    """Write the result of a command: to stdout, or atomically to ``output``.

    Args:
        text: the whole result, newline at its end.
        output: file of ``-o``; None and ``-`` are stdout.
        force: an existing file may be replaced.
        option: how the command line calls it.

    Raises:
        UsageError: see ``check_output``, or the disk refuses the write.
    """
    if secondary_rank():
        return
    if output is None or str(output) == "-":
        _to_stdout(text)
        return
    check_output(output, force, option)
    if _is_device(output):  # /dev/null, a named pipe: written to, never replaced by a file
        _to_device(text, output, option)
        return
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent)
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
        # mkstemp makes the file private; a report gets the permissions that any new file of this user gets
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, output)
        temporary = None
    except OSError as error:
        raise UsageError(
            f"{option} {output}",
            f"expected to write {len(text)} characters, found {error.strerror or error}",
            "the disk is full, or the folder cannot be written",
            "choose another file",
            code="output-unwritable",
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def runtime_line(runtime: Mapping[str, object]) -> str:
    """How an analysis ran, in one line.

    >>> runtime_line({"workers": 2, "seconds": 1.23456})
    'runtime: workers 2, seconds 1.23'
    """
    values = {k: f"{v:.2f}" if isinstance(v, float) else str(v) for k, v in runtime.items()}
    return "runtime: " + ", ".join(f"{key} {value}" for key, value in values.items())


def _to_stdout(text: str) -> None:
    # a name beyond the encoding of stdout (a byte that is no UTF-8, a letter that is no ASCII) is escaped, never an error
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise UsageError(
            "stdout",
            f"expected to write {len(text)} characters, found {error.strerror or error}",
            "the disk that stdout leads to is full, or it was closed",
            "write to another place with -o FILE",
            code="output-unwritable",
        ) from None


def _is_device(path: Path) -> bool:
    return path.is_char_device() or path.is_fifo()


def _to_device(text: str, output: Path, option: str) -> None:
    try:
        with output.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(
            f"{option} {output}",
            f"expected to write {len(text)} characters, found {error.strerror or error}",
            "the device or pipe does not take them",
            "choose a file",
            code="output-unwritable",
        ) from error


def closed_stdout() -> UsageError:
    """What is said when there is no stdout to write to."""
    return UsageError(
        "stdout",
        "expected a stream that can be written, found it closed",
        "the command was started with >&-, or by a service without one",
        "redirect it, such as > report.txt or > /dev/null",
        code="output-unwritable",
    )


def drop_stdout() -> None:
    """Point stdout at nothing: what still stands in its buffer cannot be written, and Python would try again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def remark(text: str, quiet: bool = False) -> None:
    """One line for the human at the terminal, on stderr; ``-q`` silences it."""
    if not quiet and not secondary_rank():
        sys.stderr.write(text + "\n")
