"""Interleaved repetitions and their medians, and what machine they ran on."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Timing:
    """Median over the repetitions, in ns a position: processor time of this process, and the clock on the wall."""

    cpu: float
    wall: float


def interleaved(rows: Mapping[str, tuple[Callable[[], object], int]], repeat: int) -> dict[str, Timing]:
    """Run all rows once, then all again ...: what slows the machine for a while slows every row alike.

    Args:
        rows: name -> (what to run, the positions that it covers).
        repeat: repetitions; one run of each before them is thrown away.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for turn in range(repeat + 1):
        for name, (run, positions) in rows.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            if turn:
                taken[name].append((spent[0] / positions * 1e9, spent[1] / positions * 1e9))
    return {
        name: Timing(statistics.median(c for c, _ in runs), statistics.median(w for _, w in runs))
        for name, runs in taken.items()
    }


def child(code: str, *args: str) -> tuple[float, float, str]:
    """(wall seconds, processor seconds, stdout) of a fresh interpreter; one at a time, or the second is of all of them."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    # With compiled modules beside the sources, as an install has them: a shell may forbid writing them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return time.perf_counter() - began, cpu, done.stdout


# Not getrusage: its peak survives exec, so a child of a large process would start with its parent's.
PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


def peak_mib(code: str, *args: str) -> float:
    """Peak resident set of a fresh interpreter after running code, in MiB."""
    return int(child(f"{code}\n{PEAK}", *args)[2].split()[-1]) / 1024


def machine() -> str:
    """Processor, cores, memory, versions, load: one line."""
    import numpy
    import torch

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model}, {cores} cores, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {numpy.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def save(path: Path, data: Mapping[str, object]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
