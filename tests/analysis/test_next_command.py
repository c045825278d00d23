"""The command that a finding proposes takes the same data as the one that found it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from made import Settings, analyze, randomly, write_dump

from rollout_is.analysis.findings import shell_path


def dump(folder: Path) -> Path:
    one = randomly(np.random.default_rng(0))
    one.columns["mask.loss"] = one.mask.clone()
    return write_dump(folder, [one, one], ranks=2)


def test_the_options_that_chose_the_data_are_repeated(tmp_path: Path) -> None:
    path = dump(tmp_path / "my dump")
    asked = analyze(
        path, settings=Settings(mask="loss"), columns={"train": "train_logprobs"}, steps="0:9", duplicates="newest"
    )
    text = shell_path(asked)
    assert text.startswith(f"'{path}' ")
    assert text.endswith("--column train=train_logprobs --steps 0:9 --duplicates newest --mask loss")


def test_inspect_is_given_only_what_it_takes(tmp_path: Path) -> None:
    path = dump(tmp_path)
    (path / "step_00000001" / "rank_00001.safetensors").unlink()
    asked = analyze(path, allow_partial=True)
    assert shell_path(asked, headers=True) == str(path)
    assert any(f.next == f"rollout-is inspect {path}" for f in asked.findings)


def test_a_plain_call_is_repeated_plainly(tmp_path: Path) -> None:
    path = dump(tmp_path)
    assert shell_path(analyze(path)) == str(path)
