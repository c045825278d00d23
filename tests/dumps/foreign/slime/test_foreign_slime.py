"""slime: rank files of the first version, copies, stages, slices without a rank."""

import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry

TOTALS, RESPONSES = [17, 12, 9], [12, 3, 9 - 2]
TRAIN = [torch.linspace(-3, -0.5, n) for n in RESPONSES]
ROLLOUT = [train - 0.25 for train in TRAIN]
MASKS = [torch.ones(n, dtype=torch.int32) for n in RESPONSES]
MASKS[2][:] = 0


def v1(path, *, rank, indices=(0, 1, 2), log_probs=TRAIN, rollout=ROLLOUT, extra=None, top=None, rid=0):
    data = {
        "tokens": [torch.arange(n) for n in TOTALS],
        "total_lengths": list(TOTALS),
        "response_lengths": list(RESPONSES),
        "sample_indices": list(indices),
        "loss_masks": MASKS,
        "rollout_log_probs": rollout,
        "raw_reward": [1.0] * 99,
    } | (extra or {})
    if log_probs is not None:
        data["log_probs"] = log_probs
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rid, "rank": rank, "rollout_data": data} | (top or {}), path)
    return path


def held_by(total, response, size):
    """Rank of each response position under zigzag context parallelism, position by position."""
    chunk = -(-total // (2 * size))
    ranks = []
    for logit in range(total - response - 1, total - 1):
        number = logit // chunk
        ranks.append(number if number < size else 2 * size - 1 - number)
    return ranks


def slices(columns, rank, size):
    return [
        column[[i for i, holder in enumerate(held_by(total, response, size)) if holder == rank]]
        for column, total, response in zip(columns, TOTALS, RESPONSES, strict=True)
    ]


def test_one_rank(tmp_path, read_one):
    found = read_one(v1(tmp_path / "3_1.pt", rank=1, rid=3))
    assert (found.info.format, found.info.step, found.info.rank) == ("slime/train_data-v1", 3, 1)
    assert found.offsets.tolist() == [0, 12, 15, 22]
    assert found.mask.sum() == 15
    assert found.columns["sequence_ids"].tolist() == [0, 1, 2]
    assert found.columns["prompt_lens"].tolist() == [5, 9, 2]
    assert found.columns["token_ids"][:3].tolist() == [5, 6, 7]  # the response part of the tokens
    assert "rewards" not in found.info.columns  # raw_reward is of the whole batch


def test_tensor_parallel_copies_are_dropped(tmp_path, read):
    for rank in range(4):
        v1(tmp_path / f"0_{rank}.pt", rank=rank, indices=(0, 1, 2) if rank < 2 else (3, 4, 5))
    found = read(tmp_path)
    assert [shard.info.rank for shard in found] == [0, 2]
    assert found[0].notes["copies-dropped"].message == "1 copies of 0_0.pt (tensor parallelism): dropped"


def test_pipeline_stages_without_logprobs_are_left_out(tmp_path, read):
    v1(tmp_path / "0_0.pt", rank=0, log_probs=None)
    v1(tmp_path / "0_1.pt", rank=1)
    (found,) = read(tmp_path)
    assert found.info.rank == 1
    assert found.notes["stages-left-out"].message.startswith("1 rank files hold no log_probs")


def test_only_stages_without_logprobs_is_an_error(tmp_path):
    v1(tmp_path / "0_0.pt", rank=0, log_probs=None)
    for given in (tmp_path, tmp_path / "0_0.pt"):
        with pytest.raises(DumpError) as caught:
            registry.find(given)
        assert caught.value.code == "train-logprobs-missing"


def test_slices_join_without_a_rank_when_their_lengths_prove_it(tmp_path, read):
    for rank in range(2):
        v1(tmp_path / f"0_{rank}.pt", rank=rank, log_probs=slices(TRAIN, rank, 2), rollout=slices(ROLLOUT, rank, 2))
    (found,) = read(tmp_path)
    assert torch.equal(torch.tensor(found.train), torch.cat(TRAIN).double())
    assert torch.equal(torch.tensor(found.rollout), torch.cat(ROLLOUT).double())


def test_slices_that_fit_several_ranks_are_refused(tmp_path):
    even = {
        "total_lengths": [16],
        "response_lengths": [6],
        "sample_indices": [0],
        "loss_masks": [torch.ones(6, dtype=torch.int32)],
    }
    even |= {"tokens": [torch.arange(16)]}
    for rank in range(2):
        halves = [torch.full((3,), -1.0 - rank)]
        v1(tmp_path / f"0_{rank}.pt", rank=rank, log_probs=halves, rollout=halves, extra=even)
    with pytest.raises(DumpError, match="2 context-parallel ranks") as caught:
        registry.find(tmp_path)
    assert caught.value.code == "slices-not-proven"


def test_a_lone_slice_is_refused(tmp_path):
    v1(tmp_path / "0_0.pt", rank=0, log_probs=slices(TRAIN, 0, 2), rollout=slices(ROLLOUT, 0, 2))
    with pytest.raises(DumpError) as caught:
        registry.find(tmp_path / "0_0.pt")
    assert caught.value.code == "row-lengths-differ"
    assert "context-parallel slice" in caught.value.why


def test_cuda_tags_need_no_gpu(samples, read_one):
    assert read_one(samples / "slime/v1_dump_details/train_data/0_1.pt").mask.sum() == 38


def test_keys_after_a_thousand_samples_are_seen(tmp_path, read_one):
    """The keys that tell the second version stand behind all samples."""
    sample = {key: torch.full((2,), -1.0) for key in ("rollout_log_probs", "log_probs")}
    rows = [
        {key: value.clone() for key, value in sample.items()} | {"loss_masks": MASKS[1][:2].clone()}
        for _ in range(1500)
    ]
    torch.save({"format_version": 2, "rollout_id": 1, "samples": rows, "dp_shards": []}, tmp_path / "1.pt")
    assert read_one(tmp_path).info.segments == 1500
    v1(tmp_path / "v1" / "1_0.pt", rank=0, extra={f"z{i}": [torch.zeros(1)] for i in range(1500)}, top={"late": 1})
    assert read_one(tmp_path / "v1").info.format == "slime/train_data-v1"


def test_v2_without_train_logprobs_is_answered(tmp_path):
    sample = {"rollout_log_probs": ROLLOUT[0], "loss_masks": MASKS[0], "log_probs_note": 1}
    torch.save({"format_version": 2, "rollout_id": 1, "samples": [sample], "dp_shards": []}, tmp_path / "1.pt")
    with pytest.raises(DumpError) as caught:
        registry.find(tmp_path / "1.pt")
    assert caught.value.code == "train-logprobs-missing"
    assert "--get-mismatch-metrics" in caught.value.fix
