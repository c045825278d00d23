"""Two nodes on one machine: torchrun agents that rendezvous over loopback, each with its own shards, or both with the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import Settings, analyze, randomly, write_dump

LIMIT = 240  # seconds; a rank that waits for a dead one gives up after 100


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, port: int, node: int, *args: str, own: bool = True) -> subprocess.Popen[str]:
    """One agent of two, in its own folder, so that the relative path ``dump`` is another one on each node."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", f"--node-rank={node}", "--local-addr=127.0.0.1",
        "-m", "rollout_is", "analyze", "dump", *(["--own-shards"] if own else []), *args,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)


def run(nodes: list[Path], *args: str, own: bool = True) -> tuple[list[int], str, str]:
    """Exit codes of both agents, and what they printed together."""
    port = free_port()
    agents = [start(folder, port, i, *args, own=own) for i, folder in enumerate(nodes)]
    try:
        printed = [agent.communicate(timeout=LIMIT) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    return [a.returncode for a in agents], "".join(out for out, _ in printed), "".join(err for _, err in printed)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    rng = np.random.default_rng(21)
    shards = [randomly(rng, segments=10) for _ in range(4)]
    return write_dump(tmp_path / "whole" / "dump", shards, ranks=2)


def split(whole: Path, folder: Path) -> list[Path]:
    """Each node gets the shards of one rank."""
    nodes = [folder / "a", folder / "b"]
    for path in sorted(whole.rglob("*.safetensors")):
        node = nodes[int(path.stem[-1]) % 2]
        target = node / "dump" / path.relative_to(whole)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return nodes


def test_each_node_its_own_shards_gives_the_figures_of_all(whole: Path, tmp_path: Path) -> None:
    codes, out, err = run(split(whole, tmp_path), "--format", "json", "--top", "4", "--by", "rank")
    assert codes == [0, 0], err[-3000:]
    printed = json.loads(out)
    want = json.loads(analyze(whole, settings=Settings(top=4, by=("rank",))).to_json())
    for key in ("views", "groups", "coverage", "notes"):
        assert printed[key] == want[key], key
    assert [row["log_ratio"] for row in printed["worst"]["tokens"]] == [
        row["log_ratio"] for row in want["worst"]["tokens"]
    ]


def test_a_bad_shard_on_the_other_node_is_said(whole: Path, tmp_path: Path) -> None:
    nodes = split(whole, tmp_path)
    bad = min(nodes[1].rglob("*.safetensors"))
    bad.write_bytes(bad.read_bytes()[:-60])
    codes, out, err = run(nodes)
    assert codes == [1, 1] and out == ""
    assert "short by 60" in err and "Traceback (most recent call last)" not in out
    codes, out, err = run(nodes, "--allow-partial", "--format", "json")
    assert codes == [0, 0], err[-3000:]
    assert json.loads(out)["coverage"]["shards"] == 3


def test_a_shard_on_both_nodes_is_refused(whole: Path, tmp_path: Path) -> None:
    for node in ("a", "b"):
        shutil.copytree(whole, tmp_path / node / "dump")
    codes, out, err = run([tmp_path / "a", tmp_path / "b"])
    assert codes == [1, 1] and out == "" and "--duplicates" in err


def test_other_files_than_rank_0_are_refused_without_own_shards(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "a" / "dump")
    shutil.copytree(whole, tmp_path / "b" / "dump")
    step = max((tmp_path / "b" / "dump").iterdir())
    shutil.rmtree(step)
    codes, out, err = run([tmp_path / "a", tmp_path / "b"], own=False)
    assert codes == [1, 1] and out == "" and "do not see the same files" in err


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    whole = write_dump(tmp_path / "whole" / "dump", [randomly(rng, segments=10) for _ in range(2)], ranks=2)
    nodes = split(whole, tmp_path)
    port = free_port()
    agents = [start(folder, port, i) for i, folder in enumerate(nodes)]
    try:
        victim = _rank_of(agents[1].pid)
        os.kill(victim, signal.SIGKILL)
        codes = [agent.wait(timeout=LIMIT) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.communicate()
    assert codes[1] == 1  # its launcher saw it die
    assert codes[0] in (0, 1)  # 0 only where the other had finished before


def _rank_of(agent: int) -> int:
    """The first child of a torchrun agent, as soon as there is one."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.02)
    raise AssertionError("torchrun started no rank")
