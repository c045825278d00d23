"""Every example in the README is run: commands print what stands below them, Python runs, links lead somewhere."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest

from rollout_is.cli.app import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def replayed(page: str) -> str:
    """The page with the output of each ``rollout-is`` and ``echo $?`` of its console blocks made anew, run in order.

    A line of dots below a command means that more follows: the lines above it are kept in number. No output shown: none is compared.
    """
    code = 0

    def run(match: re.Match[str]) -> str:
        nonlocal code
        command, shown = match[1], match[2]
        words = shlex.split(command.split("  #")[0])
        if words[0] == "rollout-is":
            out, err = io.StringIO(), io.StringIO()
            code = main(words[1:], stdout=out, stderr=err)
            assert code in (0, 1, 3), err.getvalue()
            printed = out.getvalue() + err.getvalue()
            if shown.endswith("...\n"):
                shown = "".join(printed.splitlines(keepends=True)[: shown.count("\n") - 1]) + "...\n"
            elif shown:
                shown = printed
        elif words[0] == "echo":
            shown = f"{code}\n"
        elif words[0] == "make":
            assert set(words[1:]) <= TARGETS
        else:
            assert words[0] in ("git", "cd", "pip", "torchrun"), command
        return f"$ {command}\n{shown}"

    def block(match: re.Match[str]) -> str:
        return match[1] + re.sub(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", run, match[2], flags=re.MULTILINE) + match[3]

    return re.sub(r"^(```console\n)(.*?)(^```$)", block, page, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch folder that looks like the checkout to a reader of the samples."""
    (tmp_path / "sample_dumps").symlink_to(ROOT / "sample_dumps")
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_there_are_examples() -> None:
    kinds = [kind for kind, _ in BLOCKS]
    assert kinds.count("console") >= 3
    assert kinds.count("python") >= 2


def test_console_examples(checkout: Path) -> None:
    """When a screen changed on purpose: ``python tests/test_readme.py`` from the checkout writes the new one; read the difference."""
    assert replayed(README) == README


def test_python_examples(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One namespace for all, in order. A comment after a print is what it prints."""
    space: dict[str, object] = {"__name__": "readme"}
    for kind, block in BLOCKS:
        if kind != "python":
            continue
        exec(compile(block, "README.md", "exec"), space)  # noqa: S102  # our own page
        promised = re.findall(r"^\s*print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == promised


def test_relative_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    pages += [*(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md", ROOT / "sample_dumps/README.md"]
    missing = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert missing == []


def test_commands_named_in_the_text_exist() -> None:
    named = {
        name
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"(?:`|^\$ |srun .*)rollout-is ([a-z]+)\b", page.read_text(encoding="utf-8"))
    }
    assert named <= set(COMMANDS)


if __name__ == "__main__":
    (ROOT / "README.md").write_text(replayed(README), encoding="utf-8")
