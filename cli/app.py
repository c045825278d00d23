"""The command line: find the command, run it, turn whatever happens into one exit code.

Adding a command
    1. a module ``cli/NAME.py`` with a typer function ``def command(...) -> int`` (Annotated options, returns the exit code);
    2. one line in ``COMMANDS`` below: name -> (module, one line of help).
  The module is imported only when its command runs, so ``--help`` costs nothing and loads no torch; heavy imports go
  inside functions. Raise RolloutIsError for anything a user can cause; ``main`` prints it and picks the code.
  Options that commands share live in ``cli/options.py``, writing results in ``cli/output.py``, tables in ``cli/render``.
  Results go to ``sys.stdout`` through ``output.write_result``, everything else to ``sys.stderr``; ``main`` redirects both,
  so a test is ``main(["analyze", path], stdout=out, stderr=err)``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import IO

from rollout_is.cli.output import closed_stdout, drop_stdout, secondary_rank, write_result
from rollout_is.dumps.errors import RolloutIsError, UsageError

# name -> (module, one line of help); the order is that of the help page
COMMANDS: dict[str, tuple[str, str]] = {
    "analyze": ("rollout_is.cli.analyze", "importance weights and mismatch, before and after masking"),
    "compare": ("rollout_is.cli.compare", "two runs, or two views, masks or scoring passes of one"),
    "check": ("rollout_is.cli.check", "limits and a baseline, for CI"),
    "baseline": ("rollout_is.cli.baseline", "write limits and reference figures from a known-good run"),
    "sweep": ("rollout_is.cli.sweep", "what each correction would do"),
    "doctor": ("rollout_is.cli.doctor", "what is wrong with these log-probs, with evidence"),
    "inspect": ("rollout_is.cli.inspect", "shards, coverage and columns, from headers alone"),
    "convert": ("rollout_is.cli.convert", "foreign dumps to rollout-is/1"),
    "explain": ("rollout_is.cli.explain", "what a figure, note or finding means and what to do about it"),
    "schema": ("rollout_is.cli.schema", "the JSON schema of the summary"),
}

BUG, WORK_LOST, INTERRUPTED = 70, 75, 130


def main(argv: Sequence[str] | None = None, stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises.

    Args:
        argv: arguments without the program's name; None takes them from the process.
        stdout, stderr: where the result and the rest go; None takes those of the process.

    >>> import io
    >>> main(["--version"], stdout=(out := io.StringIO()))
    0
    >>> out.getvalue().split()[0]
    'rollout-is'
    """
    with contextlib.ExitStack() as stack:
        if stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(stdout))
        if stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(stderr))
        try:
            if (
                sys.stdout is None
            ):  # started with it closed (``>&-``): the first file that is opened would take its place
                raise closed_stdout()
            code = _dispatch(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
            return code
        except RolloutIsError as error:
            # under torchrun all ranks end with the same error, and one of them says it
            if not secondary_rank():
                _say(f"error: {error}")
            return error.exit_code
        except KeyboardInterrupt:
            _say("interrupted")
            return INTERRUPTED
        except BrokenPipeError:  # the reader went away (``| head``): silent
            drop_stdout()
            return 0
        except MemoryError:
            _say("error: out of memory\n  why: other processes hold it\n  fix: fewer --workers, or a larger machine")
            return WORK_LOST
        except Exception as error:  # noqa: BLE001  # the one place where anything else ends: as a bug of ours
            return _bug(error)


def entry() -> None:
    """Console script: exit with the code of ``main``."""
    sys.exit(main())


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        write_result(_help())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        from rollout_is import __version__

        write_result(f"rollout-is {__version__}\n")
        return 0
    name = args[0]
    if name not in COMMANDS:
        raise _unknown(name)
    return _run(name, args[1:])


def _run(name: str, args: list[str]) -> int:
    """Parse with typer and call the command. Typer's own usage errors become ours, with exit code 2."""
    import typer
    from typer.main import get_command

    module, summary = COMMANDS[name]
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    command = importlib.import_module(module).command
    app.command(name, help=command.__doc__ or summary, context_settings={"help_option_names": ["-h", "--help"]})(
        command
    )
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # click's UsageError, wherever this typer keeps it
    parsed = get_command(app)
    try:
        with parsed.make_context(f"rollout-is {name}", list(args)) as context:
            code = parsed.invoke(context)
    except typer.Exit as done:
        return int(done.exit_code)
    except usage_error as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UsageError(
            " ".join(["rollout-is", name, *args]),
            message.splitlines()[0] if message else "wrong usage",
            "the command line could not be understood",
            f"rollout-is {name} --help",
            code="usage",
        ) from None
    return int(code or 0)


def _help() -> str:
    width = max(map(len, (*COMMANDS, "--version")))
    lines = [
        "Usage: rollout-is COMMAND [OPTIONS] ...",
        "",
        "Importance-sampling and train/rollout mismatch statistics of RL dumps, before and after masking.",
        "",
        "Commands:",
        *(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()),
        "",
        "Options:",
        f"  {'--version':<{width}}  print the version",
        f"  {'--help':<{width}}  this page; rollout-is COMMAND --help for a command's options",
        "",
        "Start with: rollout-is analyze DUMP",
    ]
    return "\n".join(lines) + "\n"


def _unknown(name: str) -> UsageError:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if not close and os.path.exists(name):
        fix = f"rollout-is analyze {name}"
    else:
        fix = f"did you mean {close[0]}?" if close else "rollout-is --help"
    return UsageError(
        f"rollout-is {name}",
        f"expected one of {', '.join(COMMANDS)}, found {name!r}",
        "the first argument is the command",
        fix,
        code="unknown-command",
    )


def _bug(error: Exception) -> int:
    if os.environ.get("ROLLOUT_IS_DEBUG") == "1":
        import traceback

        traceback.print_exc(file=sys.stderr)
    from rollout_is import __version__

    _say(
        f"error: rollout-is {__version__} failed: {type(error).__name__}: {error}\n"
        "  expected to finish or to name the fault in the input, found neither\n"
        "  why: this is a bug in rollout-is, not in your dump\n"
        "  fix: run it again with ROLLOUT_IS_DEBUG=1 and report the command, the version and the traceback"
    )
    return BUG


def _say(text: str) -> None:
    from rollout_is.cli.render.text import printable

    text = "\n".join(map(printable, text.split("\n")))  # a file name must not steer the terminal
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr closed: the exit code still tells
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
