"""A dump far larger than memory should have to be: written on the fly, analysed, watched, deleted.

    python benchmarks/big.py FOLDER [--gb 16] [--workers N] [--keep]

Real bytes, not a sparse file. Shards are copies of a few seeds with their own step; the peak of the resident set of every
process of the run is sampled from outside while it works.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import data
from measure import machine, peak_mib

SHARD = 4 * data.POSITIONS  # 151 MB a shard


def largest_mib(pid: int) -> float:
    """Resident set now of the largest among a process and its children."""
    largest = 0.0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        except (OSError, ValueError):  # it ended while it was read
            continue
        if int(folder.name) == pid or int(status.get("PPid", "0")) == pid:
            largest = max(largest, int(status.get("VmRSS", "0 kB").split()[0]) / 1024)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description="Make, analyse and delete a very large dump.")
    parser.add_argument("folder", type=Path, help="a folder on a disk with room")
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the dump there")
    args = parser.parse_args()
    dump = args.folder / "rollout-is-big"
    shards = max(1, round(args.gb * 1e9 / (9 * SHARD)))
    print(machine(), flush=True)
    try:
        began = time.perf_counter()
        for shard in range(shards):
            data.usual(dump, 1, SHARD, first=shard)
        size = sum(path.stat().st_size for path in dump.rglob("*.safetensors"))
        print(
            f"wrote {size / 1e9:.2f} GB, {shards * SHARD:,} positions, in {time.perf_counter() - began:.0f} s",
            flush=True,
        )

        began = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "rollout_is",
            "analyze",
            str(dump),
            "--format",
            "json",
            "--workers",
            str(args.workers),
        ]
        peak = 0.0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while True:
                peak = max(peak, largest_mib(process.pid))
                try:
                    out, _ = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    continue
        seconds = time.perf_counter() - began
        if process.returncode:
            sys.exit(process.returncode)
        base = peak_mib("import torch")
        coverage = json.loads(out)["coverage"]
        print(f"analysed in {seconds:.1f} s: {size / seconds / 1e9:.2f} GB/s with {args.workers} workers")
        print(
            f"coverage: {coverage['positions']:,} positions, {coverage['valid_tokens']:,} valid, {coverage['sequences']:,} sequences"
        )
        print(f"largest process: {peak:.0f} MiB resident, {peak - base:.0f} beyond import torch ({base:.0f})")
    finally:
        if not args.keep:
            shutil.rmtree(dump, ignore_errors=True)


if __name__ == "__main__":
    main()
