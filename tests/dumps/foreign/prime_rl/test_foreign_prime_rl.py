"""prime-rl: unfinished steps, weight streams, nulls."""

import json

import numpy as np
import pytest

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry


def write(path, **changes):
    row = {
        "schema_version": 1,
        "step": 4,
        "rank": 1,
        "export_sequence_idx": 0,
        "loss_mask": [False, True, True, True],
        "trainer_logprobs": [-9.0, -1.0, -2.0, -3.0],
        "inference_logprobs": [0.0, -1.5, -2.0, None],
        "rl_weights": [None] * 4,
        "ref_kl_weights": [None] * 4,
    } | changes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row) + "\n")
    return path


def test_a_finished_step_reads_as_the_current_policy(tmp_path, read_one):
    path = write(tmp_path / "step_4" / "rank_1.jsonl")
    (tmp_path / "step_4" / "STABLE").touch()
    found = read_one(tmp_path)
    assert (found.info.step, found.info.rank) == (4, 1)
    assert found.info.name == "step_4/rank_1.jsonl"
    assert found.info.metadata["train_policy"] == "current"
    assert "policy drift" in found.notes["train-policy-current"].message
    assert found.mask.tolist() == [False, True, True, True]
    assert np.isnan(found.rollout[3])  # null is no data, and the mask says that it should be there
    assert path.exists()


def test_a_step_without_stable_is_not_read(tmp_path):
    path = write(tmp_path / "step_4" / "rank_1.jsonl")
    for given in (path, tmp_path):
        with pytest.raises(DumpError) as caught:
            registry.find(given)
        assert caught.value.code == "unfinished-step"
        assert "STABLE" in caught.value.problem


def test_an_unfinished_step_beside_finished_ones_is_left_out_and_said(tmp_path, read):
    for step in (4, 5):
        write(tmp_path / f"step_{step}" / "rank_1.jsonl", step=step)
    (tmp_path / "step_4" / "STABLE").touch()
    (found,) = read(tmp_path)
    assert found.info.step == 4
    assert found.notes["unfinished-step"].message == "step_5 has no STABLE marker: 1 unfinished files are left out"


@pytest.mark.parametrize(
    ("streams", "mask"),
    [
        ({"rl_weights": [0.0, 1.0, 0.0, 1.0]}, [False, True, False, True]),
        ({"ref_kl_weights": [0.0, 0.0, 0.5, 0.0]}, [False, False, True, False]),
        ({"rl_weights": [0.0, 1.0, 0.0, 0.0], "ref_kl_weights": [0.0, 0.0, 0.5, 0.0]}, [False, True, True, False]),
        ({"rl_weights": [1.0, 1.0, None, 1.0]}, [False, True, False, True]),
    ],
)
def test_tokens_without_a_weight_have_no_sampling_logprob(tmp_path, read_one, streams, mask):
    found = read_one(write(tmp_path / "rank_1.jsonl", **streams))
    assert found.mask.tolist() == mask
    assert found.info.columns["mask"] == "loss_mask & (rl_weights | ref_kl_weights)"
