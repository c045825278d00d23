"""``make bench``: speed and memory against what a user would otherwise run, as ratios within one run.

    python benchmarks/bench.py [--repeat N] [--shards N] [--folder FOLDER] [--only SECTION ...] [--json FILE]

One process, one torch thread, page-cached files. In the tables a row is ns a position of the dump, masked positions counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import baselines
import data
import torch
from measure import Timing, child, interleaved, machine, peak_mib, save

import rollout_is
from rollout_is.analysis.settings import Settings

Rows = dict[str, tuple[Callable[[], object], int]]
REPEAT = 5


def engine(paths: list[Path], only: str | None = None, workers: int = 1) -> Callable[[], object]:
    texts = [str(path) for path in paths]
    return lambda: rollout_is.analyze(texts, settings=Settings(only=only), workers=workers)


def say(text: str = "") -> None:
    print(text, flush=True)


def table(rows: Mapping[str, Timing], base: str, targets: Mapping[str, str], wall: bool = False) -> dict[str, float]:
    """Print a section; the ratios of each row to the base row."""
    say(f"  {'':46}{'ns/position':>12}{'ratio':>9}  to reach")
    ratios = {}
    for name, timing in rows.items():
        value, unit = (timing.wall, rows[base].wall) if wall else (timing.cpu, rows[base].cpu)
        ratios[name] = value / unit
        say(f"  {name:46}{value:12.2f}{ratios[name]:8.2f}x  {targets.get(name, '')}")
    return ratios


def speed(folder: Path, shards: int, repeat: int) -> dict[str, float]:
    """Against the bytes and against the two baselines."""
    paths = data.usual(folder / "usual", shards)
    every, one = shards * data.POSITIONS, data.POSITIONS
    packs = 32
    say(f"\nspeed: {shards} shards of {data.POSITIONS:,} positions, processor time of one process")
    rows: Rows = {
        "read all bytes": (lambda: baselines.read_bytes(paths), every),
        "rollout-is, full set": (engine(paths), every),
        "rollout-is, --only weights": (engine(paths, only="weights"), every),
        "whole arrays, torch float64, no quantiles": (lambda: baselines.whole_arrays(paths[0], sort=False), one),
        "whole arrays, torch float64, same figures": (lambda: baselines.whole_arrays(paths[0]), one),
        "padded rectangle per pack, three levels": (
            lambda: baselines.padded_rectangles(paths[0], packs),
            packs * data.PACK,
        ),
    }
    timings = interleaved(rows, repeat)
    targets = {"rollout-is, full set": "<= 25x", "rollout-is, --only weights": "<= 13x"}
    ratios = table(timings, "read all bytes", targets)
    full = ratios["rollout-is, full set"]
    against = {
        "whole arrays, no quantiles / rollout-is": (ratios["whole arrays, torch float64, no quantiles"] / full, ""),
        "whole arrays, same figures / rollout-is": (
            ratios["whole arrays, torch float64, same figures"] / full,
            ">= 4x",
        ),
        "padded rectangles / rollout-is": (ratios["padded rectangle per pack, three levels"] / full, ">= 40x"),
    }
    for name, (ratio, target) in against.items():
        say(f"  {name:58}{ratio:8.1f}x  {target}")
    return ratios | {name: ratio for name, (ratio, _) in against.items()}


def processes(folder: Path, shards: int, repeat: int) -> dict[str, float]:
    """Two processes against one, by the clock on the wall; two busy loops first, to know whether there are two cores."""
    say("\nprocesses: wall time, the start of the workers included")
    spin = "t = 0\nfor i in range(20_000_000): t += i"
    one = min(child(spin)[0] for _ in range(3))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        two = min(max(wall for wall, *_ in pool.map(child, [spin, spin])) for _ in range(3))
    say(
        f"  two busy processes run at {one / two:.2f} of the speed of one: the best speed-up to expect is {2 * one / two:.2f}x"
    )
    found = {"two busy loops": 2 * one / two}
    for several in (shards, 4 * shards):  # what is serial stays the same
        paths, every = data.usual(folder / "usual", several), several * data.POSITIONS
        say(f"  {several} shards")
        rows: Rows = {f"{n} workers": (engine(paths, workers=n), every) for n in (1, 2)}
        timings = interleaved(rows, repeat)
        table(timings, "1 workers", {"2 workers": "<= 0.56x"}, wall=True)
        found[f"speed-up, {several} shards"] = timings["1 workers"].wall / timings["2 workers"].wall
        say(f"  {'speed-up':58}{found[f'speed-up, {several} shards']:8.2f}x  >= 1.8x on two real cores")
    return found


def linear(folder: Path, shards: int, repeat: int) -> dict[str, float]:
    """The same cost a position at any size."""
    say("\nlinearity: positions of one dump")
    paths = data.usual(folder / "usual", shards)
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= shards]
    rows: Rows = {f"{n * data.POSITIONS:,}": (engine(paths[:n]), n * data.POSITIONS) for n in sizes}
    return table(interleaved(rows, repeat), f"{data.POSITIONS:,}", {name: "1x" for name in rows})


def shapes(folder: Path, repeat: int) -> dict[str, float]:
    """Short sequences, one long sequence, masks full of holes."""
    say("\nshape of the data: one shard each")
    kinds = {
        "sequences of 500": (data.regular(folder / "len500.safetensors", 500), ""),
        "one sequence of 4,194,304": (data.regular(folder / "len4m.safetensors", data.POSITIONS), "<= 2x"),
        "sequences of 8": (data.regular(folder / "len8.safetensors", 8), "<= 4x"),
        "a hole every 5 tokens": (data.regular(folder / "hole5.safetensors", 500, 5), "<= 4x"),
        "a hole every 1000 tokens": (data.regular(folder / "hole1000.safetensors", 500, 1000), "<= 4x"),
    }
    rows: Rows = {name: (engine([path]), data.POSITIONS) for name, (path, _) in kinds.items()}
    return table(interleaved(rows, repeat), "sequences of 500", {name: target for name, (_, target) in kinds.items()})


def start_up(folder: Path, repeat: int) -> dict[str, float]:
    """A tiny dump through the command against an interpreter that imports torch."""
    say("\nstart-up of a fresh process: seconds on the wall and of processor time, medians")
    data.usual(folder / "tiny", 1, positions=data.PACK)
    run = "import sys; from rollout_is.cli.app import main; sys.exit(main(['analyze', sys.argv[1], '-q', '--workers', '1'], sys.stdout, sys.stderr))"
    commands = {
        "import torch": "import torch",
        "rollout-is analyze, one small shard": run,
        "rollout-is --help": "import sys; from rollout_is.cli.app import main; sys.exit(main(['--help'], sys.stdout, sys.stderr))",
        "python": "",
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(2 * repeat):
        for name, code in commands.items():
            taken[name].append(child(code, str(folder / "tiny"))[:2])
    wall, cpu = ({name: statistics.median(run[i] for run in runs) for name, runs in taken.items()} for i in (0, 1))
    for name in commands:
        say(f"  {name:46}{wall[name]:8.3f} s{cpu[name]:8.3f} s")
    beyond = {}
    for label, name, base, target in (
        ("beyond import torch", "rollout-is analyze, one small shard", "import torch", 0.3),
        ("--help beyond python", "rollout-is --help", "python", 0.2),
    ):
        beyond[label] = cpu[name] - cpu[base]
        say(f"  {label:46}{wall[name] - wall[base]:8.3f} s{beyond[label]:8.3f} s  <= {target} s")
    return beyond


def memory(folder: Path, shards: int) -> dict[str, float]:
    """Peak resident set beyond import torch, of one process, on a small and a large dump."""
    say("\nmemory: peak resident set beyond import torch, MiB")
    paths = [str(path) for path in data.usual(folder / "usual", shards)]
    base = peak_mib("import torch")
    code = "import sys, rollout_is; rollout_is.analyze(sys.argv[1:], workers=1)"
    taken = {}
    for name, some in (("one shard", paths[:1]), (f"{shards} shards", paths)):
        taken[name] = peak_mib(code, *some) - base
        say(f"  {name:46}{taken[name]:8.0f}    <= 400")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of rollout-is as ratios within one run.")
    parser.add_argument("--repeat", type=int, default=REPEAT, help="repetitions of each row (median)")
    parser.add_argument("--shards", type=int, default=8, help="shards of 4M positions (38 MB each)")
    parser.add_argument(
        "--folder", type=Path, help="where to keep the data; default: a temporary folder, deleted at the end"
    )
    parser.add_argument("--only", nargs="*", metavar="SECTION", help="speed processes linear shapes start memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    say(machine())
    with tempfile.TemporaryDirectory(prefix="rollout-is-bench-") as temporary:
        folder = args.folder or Path(temporary)
        sections: dict[str, Callable[[], dict[str, float]]] = {
            "speed": lambda: speed(folder, args.shards, args.repeat),
            "processes": lambda: processes(folder, args.shards, args.repeat),
            "linear": lambda: linear(folder, args.shards, args.repeat),
            "shapes": lambda: shapes(folder, args.repeat),
            "start": lambda: start_up(folder, args.repeat),
            "memory": lambda: memory(folder, args.shards),
        }
        for name in args.only or []:
            if name not in sections:
                parser.error(f"no section {name!r}; there are {', '.join(sections)}")
        results = {name: run() for name, run in sections.items() if not args.only or name in args.only}
        if args.json:
            save(args.json, {"machine": machine(), "sections": results})


if __name__ == "__main__":
    sys.exit(main())
