"""Compiles the kernel in analysis/fused when rollout-is is installed; where that does not work, goes on without it.

The library is plain C without a dependency, loaded by ctypes, so one build serves every version of Python. On x86-64 it holds the
code for three levels of processors and picks one when it is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("analysis/fused")
LIBRARY = SOURCES / "_block.so"
# Nobody looks at the processor's floating-point exceptions.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fvisibility=default", "-fno-trapping-math", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"]
# Without a processor to tune for, gcc schedules for machines that have none of these registers.
LEVELS = {"avx512": [*AVX512, "-mtune=skylake-avx512"], "avx2": [*AVX2, "-mtune=haswell"], "plain": []}
WITHOUT = "ROLLOUT_IS_BUILD_KERNEL"  # 0, false, no or off: do not compile


def compile_kernel(root: Path, library: Path) -> bool:
    """Build the library from the sources below ``root``; False, and a word on stderr, where there is no compiler or it fails."""
    compiler = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    wanted = os.environ.get(WITHOUT, "").lower() not in ("0", "false", "no", "off")
    if not wanted or sys.platform == "win32" or compiler is None:
        return False
    sources = root / SOURCES
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(path.read_bytes())
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)

        def run(*arguments: str) -> None:
            subprocess.run(
                [*shlex.split(compiler), *arguments], check=True, capture_output=True, text=True, timeout=120
            )

        try:
            for level, flags in LEVELS.items() if x86 else [("plain", [])]:
                for part in ("block", "sequences"):
                    name = f"-D{part.upper()}=rollout_is_{part}_{level}"
                    run(*FLAGS, *flags, name, "-c", str(sources / f"{part}.c"), "-o", str(out / f"{part}_{level}.o"))
            said = f'-DSOURCES="{digest.hexdigest()}"'
            run(*FLAGS, said, "-c", str(sources / "level.c"), "-o", str(out / "level.o"))
            run("-shared", *sorted(str(path) for path in out.glob("*.o")), "-o", str(out / LIBRARY.name))
            # Renamed into place: a process that has the old one loaded keeps it.
            shutil.copy(out / LIBRARY.name, library.with_suffix(".new"))
            library.with_suffix(".new").replace(library)
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: CC cannot be split into words
            why = getattr(error, "stderr", None) or error
            sys.stderr.write(f"rollout-is: no compiled kernel, numpy takes its place ({compiler}: {why})\n")
            return False
    return True


def platform_tag() -> str:
    """Of a wheel that holds the library; macOS releases from 11 on are named by their major number alone."""
    name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    found = re.fullmatch(r"macosx_(\d+)_\d+_(\w+)", name)
    return f"macosx_{found[1]}_0_{found[2]}" if found and int(found[1]) >= 11 else name


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs around the making of a wheel (an editable one too)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile: in place for an editable install, else outside the sources, which may not be ours to write to."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        self._folder = tempfile.mkdtemp(prefix="rollout-is-")
        library = root / LIBRARY if version == "editable" else Path(self._folder) / LIBRARY.name
        if not compile_kernel(root, library):
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"rollout_is/{LIBRARY.as_posix()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel holds it by now."""
        if self.target_name == "wheel":
            shutil.rmtree(self._folder, ignore_errors=True)
