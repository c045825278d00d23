"""miles: context-parallel ranks that the file names, and the loss's own dump."""

import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry

TOTALS, RESPONSES = [17, 12, 40, 5], [12, 3, 33, 1]
TRAIN = [torch.linspace(-3, -0.5, n) for n in RESPONSES]
ROLLOUT = [train * 1.01 for train in TRAIN]


def sliced(columns, rank, size):
    """The zigzag slices of a rank, position by position: rank r has chunks r and 2 size - 1 - r of the logits."""
    held = []
    for column, total, response in zip(columns, TOTALS, RESPONSES, strict=True):
        chunk = (total + 2 * size - 1) // (2 * size)
        wanted = [i for i in range(response) if (i + total - response - 1) // chunk in (rank, 2 * size - 1 - rank)]
        held.append(column[wanted])
    return held


def write(path, rank, cp_rank, size, *, log_probs=True, top=()):
    data = {
        "tokens": [torch.arange(n) for n in TOTALS],
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "sample_indices": [0, 1, 2, 3],
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in RESPONSES],
        "rollout_log_probs": sliced(ROLLOUT, cp_rank, size),
    }
    if log_probs:
        data["log_probs"] = sliced(TRAIN, cp_rank, size)
    content = {
        "rollout_id": 0,
        "rank": rank,
        "rollout_data": data,
        "cp_rank": cp_rank,
        "cp_size": size,
        "qkv_format": "thd",
    }
    torch.save(content | dict(top), path)


@pytest.mark.parametrize("size", [2, 4])
def test_slices_join_and_copies_are_dropped(tmp_path, read, size):
    """Tensor parallelism 2: each slice is written twice."""
    for rank in range(2 * size):
        write(tmp_path / f"0_{rank}.pt", rank, rank // 2, size)
    (found,) = read(tmp_path)
    assert found.info.format == "miles/train_data"
    assert torch.equal(torch.tensor(found.train), torch.cat(TRAIN).double())
    assert torch.equal(torch.tensor(found.rollout), torch.cat(ROLLOUT).double())
    assert found.offsets.tolist() == [0, 12, 15, 48, 49]
    assert f"{size} context-parallel slices joined" in found.notes["slices-joined"].message
    assert f"{size} copies of 0_0.pt" in found.notes["copies-dropped"].message


def test_stages_before_the_last_are_left_out(tmp_path, read):
    for rank in range(4):
        write(tmp_path / f"0_{rank}.pt", rank, rank % 2, 2, log_probs=rank >= 2)
    (found,) = read(tmp_path)
    assert torch.equal(torch.tensor(found.train), torch.cat(TRAIN).double())
    assert "2 rank files hold no log_probs" in found.notes["stages-left-out"].message


@pytest.mark.parametrize(
    ("ranks", "top", "found"),
    [
        ((0, 1, 2), {}, "cp_size is 4"),  # a file is missing
        ((0, 1), {"qkv_format": "bshd"}, "bshd"),
        ((0, 1), {"cp_rank": 0}, "no context-parallel ranks"),
    ],
)
def test_unproven_layouts_are_refused(tmp_path, ranks, top, found):
    size = 4 if len(ranks) == 3 else 2
    for rank in ranks:
        write(tmp_path / f"0_{rank}.pt", rank, rank, size, top=top)
    with pytest.raises(DumpError, match=found) as caught:
        registry.find(tmp_path)
    assert caught.value.code == "slices-not-proven"


def debug_sample(**changes):
    train = torch.tensor([-1.0, -2.0, -0.5])
    return {
        "index": 0,
        "total_length": 7,
        "response_length": 3,
        "train_log_probs": train,
        "old_log_probs": train - 0.5,
        "rollout_log_probs": train + 0.25,
        "local_loss_mask": torch.tensor([1.0, 0.0, 1.0]),
    } | changes


def test_policy_loss_debug_is_of_the_current_policy(tmp_path, read_one):
    torch.save({"rank": 3, "call": 12, "samples": [debug_sample()]}, tmp_path / "rank_3_call_12.pt")
    found = read_one(tmp_path)
    assert (found.info.step, found.info.rank) == (None, 3)
    assert found.info.metadata["train_policy"] == "current"
    assert (found.train - found.rollout)[found.mask].tolist() == [-0.25, -0.25]
    assert found.columns["logprobs.old"].tolist() == [-1.5, -2.5, -1.0]
    assert "old-equals-rollout" not in found.notes


def test_policy_loss_debug_says_when_old_is_the_engine_itself(tmp_path, read_one):
    same = debug_sample()
    same["old_log_probs"] = same["rollout_log_probs"]
    torch.save({"rank": 0, "call": 0, "samples": [same]}, tmp_path / "a.pt")
    assert "--use-rollout-logprobs" in read_one(tmp_path / "a.pt").notes["old-equals-rollout"].message


def test_policy_loss_debug_slices_are_said(tmp_path, read_one):
    torch.save({"rank": 0, "call": 0, "samples": [debug_sample(response_length=6)]}, tmp_path / "a.pt")
    assert read_one(tmp_path / "a.pt").notes["slices-not-joined"].severity == "error"
