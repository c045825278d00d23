"""What is built and installed: rollout_is and nothing else, from a checkout and from its own sdist."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build(project: Path, target: str, out: Path, **variables: str) -> Path:
    """Build without isolation, so without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    environment = os.environ | variables
    done = subprocess.run(
        command, check=False, cwd=project, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


def python(code: str, *, path: Path | None = None) -> str:
    """Output of code in a fresh interpreter outside the checkout, with ``path`` in front of the installed packages."""
    inserted = f"import sys; sys.path[:] = [p for p in sys.path if p != {str(ROOT / 'src')!r}]; " if path else ""
    if path:
        inserted += f"sys.path.insert(0, {str(path)!r}); "
    done = subprocess.run(
        [sys.executable, "-I", "-c", inserted + code], check=False, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_holds_only_rollout_is(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names} == {"rollout_is", "rollout_is-0.1.0.dist-info"}
    assert len(names) == len(set(names))
    for part in ("cli/app.py", "analysis/summary.py", "dumps/shard.py", "py.typed", "__main__.py"):
        assert f"rollout_is/{part}" in names
    on_disk = {str(p.relative_to(ROOT)) for room in ("cli", "analysis", "dumps") for p in (ROOT / room).rglob("*.py")}
    assert {n.removeprefix("rollout_is/") for n in names if n.endswith(".py")} >= on_disk


def test_sdist_holds_only_the_sources_and_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        tops = {n.split("/")[1] for n in archive.getnames() if "/" in n}
        archive.extractall(tmp_path, filter="data")
    expected = {
        "src",
        "cli",
        "analysis",
        "dumps",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "pyproject.toml",
        "hatch_build.py",
    }
    assert tops - {"PKG-INFO", ".gitignore"} == expected
    (unpacked,) = tmp_path.iterdir()
    again = build(unpacked, "wheel", tmp_path / "out")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on PATH")
def test_wheel_holds_the_kernel_and_says_for_which_platform(wheel: Path) -> None:
    assert "rollout_is/analysis/fused/_block.so" in zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith("rollout_is-0.1.0-py3-none-") and "any" not in wheel.name


@pytest.mark.parametrize(
    "variables",
    [
        {"ROLLOUT_IS_BUILD_KERNEL": "0"},
        {"ROLLOUT_IS_BUILD_KERNEL": "false"},
        {"CC": "false"},
        {"CC": "no-such-compiler"},
        {"CC": "'"},
    ],
)
def test_without_a_compiler_the_wheel_is_plain(sdist: Path, tmp_path: Path, variables: dict[str, str]) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "in", filter="data")
    (unpacked,) = (tmp_path / "in").iterdir()
    plain = build(unpacked, "wheel", tmp_path / "out", **variables)
    assert "rollout_is/analysis/fused/_block.so" not in zipfile.ZipFile(plain).namelist()
    assert plain.name == "rollout_is-0.1.0-py3-none-any.whl"


def test_a_wheel_leaves_nothing_among_the_sources(sdist: Path, tmp_path: Path) -> None:
    """They may be on a medium that cannot be written to."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "in", filter="data")
    (unpacked,) = (tmp_path / "in").iterdir()
    before = sorted(unpacked.rglob("*"))
    build(unpacked, "wheel", tmp_path / "out")
    assert sorted(p for p in unpacked.rglob("*") if "__pycache__" not in p.parts) == before


def test_wheel_imports_from_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    where = python("import rollout_is.dumps.shard as m, rollout_is.cli; print(m.__file__)", path=tmp_path)
    assert where == str(tmp_path / "rollout_is" / "dumps" / "shard.py")


def test_nothing_but_rollout_is_becomes_importable() -> None:
    """The rooms stand at the top of the checkout, so their short names must not leak into an installed environment."""
    code = "import importlib.util as u; print([n for n in ('cli', 'analysis', 'dumps', 'tests', 'benchmarks') if u.find_spec(n)])"
    assert python(code) == "[]"
    assert python("import rollout_is; print(rollout_is.__version__)") == "0.1.0"
    assert [p.name for p in (ROOT / "src").iterdir() if p.name != "__pycache__"] == ["rollout_is"]


def test_the_links_to_the_rooms_are_relative() -> None:
    for room in ("cli", "analysis", "dumps"):
        link = ROOT / "src" / "rollout_is" / room
        assert link.is_symlink()
        assert link.readlink() == Path("../..") / room


def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources() -> list[Path]:
    return [p for room in ("cli", "analysis", "dumps") for p in sorted((ROOT / room).rglob("*.py"))]


def test_only_reduce_speaks_to_other_ranks() -> None:
    users = {str(p.relative_to(ROOT)) for p in sources() if any(n.startswith("torch.distributed") for n in imported(p))}
    assert users <= {"analysis/reduce.py"}


def test_no_file_grows_past_500_lines() -> None:
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources()}
    assert {name: n for name, n in sizes.items() if n > 500} == {}
    assert sorted(sizes.values())[len(sizes) // 2] <= 150


@pytest.mark.parametrize(
    "name", ["rollout_is", "rollout_is.cli.app", "rollout_is.analysis.summary", "rollout_is.dumps.shard"]
)
def test_light_modules_load_no_torch(name: str) -> None:
    assert python(f"import sys, {name}; print('torch' in sys.modules)") == "False"


def test_torch_is_pinned_exactly() -> None:
    """An unpinned torch on Linux is the newest CUDA build, of several gigabytes."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch")]
    assert pins == ["torch==2.13.0"]
    assert "constraints.txt" in (ROOT / "Makefile").read_text()
