"""NeMo-RL: the layouts that need more than reading two columns."""

import json

import numpy as np
import pytest

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry

PREV = [[0.0, -1.0, -2.0, -0.5, -9.0], [0.0, -3.0, -0.25, 0.0, 0.0]]
GEN = [[0.0, 0.0, -2.5, -0.25, 0.0], [0.0, 0.0, -0.5, 0.0, 0.0]]
TOKEN_MASK = [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0]]


def write(path, *, sample_mask=(1.0, 1.0), drop=(), change=None):
    with open(path, "w") as file:
        for i in range(2):
            row = {
                "content": ['he said "generation_logprobs": [[1, 2]] ]}'],
                "rewards": [float(i)],
                "input_lengths": [4 - i],
                "token_ids": [[5, 6, 7, 8, 0]],
                "token_loss_mask": [TOKEN_MASK[i]],
                "sample_loss_mask": [sample_mask[i]],
                "generation_logprobs": [GEN[i]],
                "prev_logprobs": [PREV[i]],
                "idx": i,
            }
            row = {key: value for key, value in row.items() if key not in drop}
            if change:
                change(i, row)
            file.write(json.dumps(row) + "\n")
    return path


def test_the_mask_is_a_product(tmp_path, read_one):
    found = read_one(write(tmp_path / "train_data_step7.jsonl", sample_mask=(1.0, 0.0)))
    assert found.info.step == 7
    assert found.info.layout == "rectangular"
    assert found.mask.tolist() == [False, False, True, True, False] + [False] * 5
    assert "drops 1 of 2 rows" in found.notes["rows-dropped-by-trainer"].message
    assert found.train.tolist() == PREV[0] + PREV[1]
    assert found.rollout.tolist() == GEN[0] + GEN[1]
    assert found.columns["rewards"].tolist() == [0.0, 1.0]
    assert found.columns["sequence_ids"].tolist() == [0, 1]
    assert found.columns["token_ids"].dtype == np.int64


def test_keys_inside_text_are_not_columns(tmp_path, read_one):
    found = read_one(write(tmp_path / "a.jsonl"))
    assert found.offsets.tolist() == [0, 5, 10]


def test_old_files_without_masks_get_one_and_say_so(tmp_path, read_one):
    found = read_one(write(tmp_path / "a.jsonl", drop=("token_ids", "token_loss_mask", "sample_loss_mask")))
    assert found.mask.tolist() == [False, False, True, True, False, False, False, True, False, False]
    assert found.notes["mask-reconstructed"].severity == "warning"
    assert "no mask in the file" in found.info.columns["mask"]
    assert "token_ids" not in found.info.columns


def test_the_all_zero_placeholder_is_an_error_note(tmp_path, read_one, samples):
    def zero(i, row):
        row["prev_logprobs"] = [[0.0] * 5]

    note = read_one(write(tmp_path / "a.jsonl", change=zero)).notes["placeholder-train-logprobs"]
    assert note.severity == "error"
    assert "no figure compares the two engines" in note.message
    assert "placeholder-train-logprobs" in read_one(samples / "nemo_rl" / "exp_002_force_on_policy_ratio").notes
    assert "placeholder-train-logprobs" not in read_one(samples / "nemo_rl/exp_001/train_data_step1.jsonl").notes


def test_top_p_zeros_are_read_as_they_stand(tmp_path, read_one):
    def zero(i, row):
        row["prev_logprobs"][0][2] = 0.0

    found = read_one(write(tmp_path / "a.jsonl", change=zero))
    ratio = (found.train - found.rollout)[found.mask]
    assert ratio.tolist() == [2.5, -0.25, 0.5]


def test_non_finite_tokens_of_json_are_values(tmp_path, read_one):
    def odd(i, row):
        row["prev_logprobs"][0][1:4] = [float("nan"), float("-inf"), None]

    found = read_one(write(tmp_path / "a.jsonl", change=odd))
    assert np.isnan(found.train[[1, 3]]).all()
    assert np.isneginf(found.train[2])


def test_unmasked_positions_are_kept(samples, read_one):
    found = read_one(samples / "nemo_rl/exp_001/train_data_step1.jsonl")
    assert np.abs(found.train - found.rollout).mean() == pytest.approx(0.5747917411665728)  # the padding counts


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"generation_logprobs": [[0.0, 1', "json-truncated"),
        ('{"generation_logprobs": [[0.0, 1.0]], "prev_logprobs": [[0.0, oops]]}', "json-damaged"),
        (
            '{"generation_logprobs": [[0.0, 1.0]], "prev_logprobs": [[0.0]], "token_loss_mask": [[1, 1]]}',
            "row-lengths-differ",
        ),
        (
            '{"generation_logprobs": [[0.0, 1.0]], "prev_logprobs": [["a", "b"]], "token_loss_mask": [[1, 1]]}',
            "not-numbers",
        ),
        ('{"prev_logprobs": [[0.0, 1.0]]}', "row-without-column"),
    ],
)
def test_damaged_rows_are_named(tmp_path, text, code):
    path = write(tmp_path / "train_data_step1.jsonl")
    with open(path, "a") as file:
        file.write(text + "\n")
    with pytest.raises(DumpError) as caught:
        (info,) = registry.find(path)
        with registry.open_shard(info) as shard:
            shard.read("train", 0, info.positions)
    assert caught.value.code == code
    assert "train_data_step1.jsonl" in caught.value.where


def test_memory_is_bounded_by_rows(tmp_path):
    """Reading a file of 6 MB row by row keeps less than a quarter of it."""
    import tracemalloc

    row = {"generation_logprobs": [[-0.123456789] * 2000], "prev_logprobs": [[-0.123456789] * 2000]}
    row |= {"token_loss_mask": [[1] * 2000], "sample_loss_mask": [1.0]}
    line = json.dumps(row) + "\n"
    path = tmp_path / "train_data_step1.jsonl"
    path.write_text(line * (6_000_000 // len(line)))
    tracemalloc.start()
    try:
        (info,) = registry.find(path)
        total = 0.0
        with registry.open_shard(info) as shard:
            for start in range(0, info.positions, 8192):
                stop = min(start + 8192, info.positions)
                for role in ("train", "rollout", "mask"):
                    total += float(shard.read(role, start, stop).double().sum())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == pytest.approx(info.positions * (1 - 2 * 0.123456789))
    assert peak < 1_500_000
