"""Memory is bounded by the unit, not by the dump: a hard address-space limit below the size of the dump."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made import Shard

CHILD = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from rollout_is.analysis.pipeline import analyze
base = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = base + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
got = analyze(sys.argv[1], workers=1)
peak = [int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmPeak")][0]
print(json.dumps({"positions": got.coverage["positions"], "over": peak - base,
                  "kl": got.views["masked"]["mismatch"]["mismatch_kl"].value}))
"""

LIMIT = 400 * 10**6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS and /proc are Linux's")
@pytest.mark.parametrize("sequence", [1000, 8_000_000])
def test_a_dump_larger_than_its_memory_limit(tmp_path: Path, sequence: int) -> None:
    n, shards = 8_000_000, 8
    generator = torch.Generator().manual_seed(0)
    rollout = torch.empty(n).exponential_(generator=generator).neg_()
    noise = torch.empty(n).normal_(0.0, 0.01, generator=generator)
    mask = torch.ones(n, dtype=torch.bool)
    mask[::100] = False
    cu = [*range(0, n, sequence), n]
    size = 0
    for rank in range(shards):
        r = rollout - 0.125 * rank
        path = Shard(r + noise, r, mask, cu).write(tmp_path / f"rank_{rank}.safetensors", step=1, rank=rank)
        size += path.stat().st_size
    assert size > 1.4 * LIMIT
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(LIMIT)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout)
    assert got["positions"] == n * shards
    assert got["over"] < LIMIT
    assert abs(got["kl"]) < 1e-4
