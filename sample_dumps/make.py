"""Make the sample dumps again: ``python sample_dumps/make.py [NAME ...] [--to FOLDER]``, without names all of them.

Everything is seeded. All but tiny_lm come out with the same bytes on every machine; tiny_lm trains a small model, and
floating-point sums differ between processors.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import packs
from broken import broken
from tiny_lm import tiny_lm
from v1 import v1

HERE = Path(__file__).resolve().parent
SAMPLES: dict[str, Callable[[Path], None]] = {
    "packed_padding": packs.packed_padding,
    "multi_turn": packs.multi_turn,
    "all_masked": packs.all_masked,
    "broken": broken,
    "v1": v1,
    "tiny_lm": tiny_lm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the sample dumps again from their seeds.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(SAMPLES)}; none means all")
    parser.add_argument("--to", type=Path, default=HERE, metavar="FOLDER", help="where to write; default: here")
    args = parser.parse_args()
    for name in args.names:
        if name not in SAMPLES:
            parser.error(f"no sample {name!r}; there are {', '.join(SAMPLES)}")
    for name in args.names or SAMPLES:
        began = time.perf_counter()
        shutil.rmtree(args.to / name, ignore_errors=True)
        SAMPLES[name](args.to)
        print(f"{name}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
