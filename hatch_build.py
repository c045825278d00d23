"""Compiles the kernel in analysis/fused when rollout-is is installed; where that does not work, goes on without it.

The library is plain C without a dependency, loaded by ctypes, so one build serves every version of Python. On x86-64 it holds the
code for three levels of processors and picks one when it is loaded.
"""

from __future__ import annotations

import os
import platform
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
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fvisibility=default", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2"]
LEVELS = {"avx512": [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"], "avx2": AVX2, "plain": []}
WITHOUT = "ROLLOUT_IS_BUILD_KERNEL"  # 0: do not compile


def compile_kernel(root: Path) -> Path | None:
    """Build the library in place; None, and a word on stderr, where there is no compiler or it fails."""
    library = root / LIBRARY
    compiler = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if os.environ.get(WITHOUT) == "0" or sys.platform == "win32" or compiler is None:
        library.unlink(missing_ok=True)
        return None
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)

        def run(*arguments: str) -> None:
            subprocess.run(
                [*shlex.split(compiler), *arguments], check=True, capture_output=True, text=True, timeout=120
            )

        try:
            for level, flags in LEVELS.items() if x86 else [("plain", [])]:
                name = f"-DBLOCK=rollout_is_block_{level}"
                run(*FLAGS, *flags, name, "-c", str(root / SOURCES / "block.c"), "-o", str(out / f"{level}.o"))
            run(*FLAGS, "-c", str(root / SOURCES / "level.c"), "-o", str(out / "level.o"))
            run("-shared", *sorted(str(path) for path in out.glob("*.o")), "-o", str(out / LIBRARY.name))
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or error
            sys.stderr.write(f"rollout-is: no compiled kernel, numpy takes its place ({compiler}: {said})\n")
            library.unlink(missing_ok=True)
            return None
        # Renamed into place: a process that has the old one loaded keeps it.
        shutil.copy(out / LIBRARY.name, library.with_suffix(".new"))
        library.with_suffix(".new").replace(library)
    return library


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before a wheel (an editable one too) is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel that holds the library says for which platform."""
        if self.target_name != "wheel":
            return
        library = compile_kernel(Path(self.root))
        if library is None:
            return
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"rollout_is/{LIBRARY.as_posix()}"
