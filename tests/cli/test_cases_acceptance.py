"""Cases of the acceptance pass, as a user meets them: nothing comparable never passes, hints that can be pasted."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from made import Shard, sequences, shard, write_dump

from rollout_is.cli.app import main


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    out, err = io.StringIO(), io.StringIO()
    code = main([*argv, "--workers", "1"], out, err)
    return code, out.getvalue(), err.getvalue()


def nothing(kind: str) -> Shard:
    """No token that could be compared: masked out (C11), or valid and not finite on one side (C17, C56)."""
    r = -np.arange(1.0, 11.0)
    if kind == "masked":
        return shard(r, r - 0.1, np.zeros(10, bool), [0, 5, 10])
    return shard(r, np.full(10, float(kind)), np.ones(10, bool), [0, 5, 10])


@pytest.mark.parametrize("kind", ["masked", "nan", "-inf"])
@pytest.mark.parametrize("limits", ["", '[limits]\n"coverage.shards" = { min = 1 }\n'])
def test_c11_no_limit_file_passes_a_dump_without_a_comparable_token(tmp_path: Path, kind: str, limits: str) -> None:
    dump = write_dump(tmp_path / "dump", [nothing(kind)])
    file = tmp_path / "limits.toml"
    file.write_text("builtin = false\n" + limits)
    code, out, _ = run("check", str(dump), "--limits", str(file))
    assert code == 1
    assert "no valid token is finite on both sides" in " ".join(out.split())


@pytest.mark.parametrize("kind", ["masked", "nan", "-inf"])
@pytest.mark.parametrize("command", ["analyze", "doctor", "compare", "sweep", "check"])
def test_c11_c17_nothing_comparable_never_exits_0(tmp_path: Path, kind: str, command: str) -> None:
    dump = write_dump(tmp_path / "dump", [nothing(kind)])
    code, _, err = run(command, str(dump))
    assert code == 1, err


@pytest.mark.parametrize("kind", ["masked", "nan"])
def test_c11_the_hint_of_compare_names_the_dump(tmp_path: Path, kind: str) -> None:
    dump = write_dump(tmp_path / "some" / "dump", [nothing(kind)])
    _, _, err = run("compare", str(dump))
    assert str(dump) in err.splitlines()[-2] + err.splitlines()[-1]


def test_c16_the_hint_of_compare_masks_names_the_dump(tmp_path: Path) -> None:
    one = nothing("masked")
    one.columns["mask.pre_rejection"] = ~one.mask
    dump = write_dump(tmp_path / "dump", [one])
    code, _, err = run("compare", str(dump), "--masks", "pre_rejection,response_mask")
    assert code == 1
    assert f"rollout-is inspect {dump}" in err


@pytest.mark.parametrize("d", [-1000.0, -1e30, 1000.0, -50.0])
def test_c76_sweep_survives_weights_beyond_float64(tmp_path: Path, d: float) -> None:
    dump = write_dump(tmp_path / "dump", [sequences([d] * 5, [d] * 5)])
    code, out, err = run("sweep", str(dump))
    assert code == 0, err
    assert "nan" not in out.lower()
