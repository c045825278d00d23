"""The writing helpers: what each place of a trainer holds becomes a dump that reads back to the same sequences."""

import itertools

import numpy as np
import pytest
import torch

from rollout_is import DumpWriter
from rollout_is.dumps.adapters import join_packs, join_parts, mask_from_labels, packed, padded, responses
from rollout_is.dumps.errors import UsageError
from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan
from rollout_is.dumps.step_dump import StepDump, thin

LENGTHS = [3, 1, 4]
TRAIN = [torch.linspace(-3, -1, n) for n in LENGTHS]
ROLLOUT = [train + 0.125 for train in TRAIN]
MASK = [torch.tensor([1, 0, 1]), torch.tensor([0]), torch.tensor([1, 1, 1, 0])]
CU = torch.tensor([0, 3, 4, 8], dtype=torch.int32)


def pad(columns):
    return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True)


def labels():
    return torch.where(torch.cat(MASK) > 0, 9, -100)[None]


def sequences(columns, tmp_path):
    """Valid (train, rollout) of each segment, after a round through the disk."""
    with DumpWriter(tmp_path / "dump") as writer:
        writer.write(step=0, **columns)
    (info,) = scan(tmp_path / "dump").shards
    with open_shard(info) as shard:
        bounds = shard.offsets().tolist()
        train, rollout, mask = (
            shard.read(role, 0, info.positions).numpy().copy() for role in ("train", "rollout", "mask")
        )
    keep = mask != 0
    return [(train[a:b][keep[a:b]].tolist(), rollout[a:b][keep[a:b]].tolist()) for a, b in itertools.pairwise(bounds)]


WANTED = [(t[m > 0].tolist(), r[m > 0].tolist()) for t, r, m in zip(TRAIN, ROLLOUT, MASK, strict=True)]
SHAPES = {
    "padded": lambda: padded(pad(TRAIN), pad(ROLLOUT), pad(MASK)),
    "padded, without the padding": lambda: padded(pad(TRAIN), pad(ROLLOUT), pad(MASK), lengths=LENGTHS),
    "lengths as a tensor": lambda: padded(pad(TRAIN), pad(ROLLOUT), pad(MASK), lengths=torch.tensor(LENGTHS)),
    "responses": lambda: responses(TRAIN, ROLLOUT, MASK),
    "packed [1, T]": lambda: packed(
        torch.cat(TRAIN)[None], torch.cat(ROLLOUT)[None], mask=torch.cat(MASK)[None], cu_seqlens=CU
    ),
    "packed [T]": lambda: packed(torch.cat(TRAIN), torch.cat(ROLLOUT), mask=torch.cat(MASK), cu_seqlens=CU),
    "packed with lengths": lambda: packed(torch.cat(TRAIN), torch.cat(ROLLOUT), mask=torch.cat(MASK), seq_lens=LENGTHS),
    "packed with labels": lambda: packed(
        torch.cat(TRAIN)[None], torch.cat(ROLLOUT)[None], labels=labels(), cu_seqlens=CU
    ),
    "sequence-parallel parts": lambda: packed(
        join_parts(torch.cat(TRAIN)[None].chunk(2, dim=1)),
        join_parts(torch.cat(ROLLOUT)[None].chunk(2, dim=1)),
        labels=join_parts(labels().chunk(2, dim=1)),
        cu_seqlens=CU,
    ),
    "gradients are of no interest": lambda: padded(pad(TRAIN).requires_grad_(), pad(ROLLOUT), pad(MASK)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_place_gives_the_same_sequences(shape, tmp_path):
    assert sequences(SHAPES[shape](), tmp_path) == WANTED


def test_packs_of_a_step_keep_their_bounds():
    one = packed(
        torch.cat(TRAIN)[None], torch.cat(ROLLOUT)[None], mask=torch.cat(MASK)[None], cu_seqlens=CU, num_padding=0
    )
    rows = padded(pad(TRAIN[:2]), pad(ROLLOUT[:2]), pad(MASK[:2]), advantages=torch.ones(2, 3))
    joined = join_packs([one, rows, one])
    assert joined["cu_seqlens"].tolist() == [0, 3, 4, 8, 11, 14, 17, 18, 22]
    assert joined["cu_packs"].tolist() == [0, 8, 14, 22]
    assert "advantages" not in joined  # only one pack has them
    assert joined["train_logprobs"].tolist() == torch.cat([*TRAIN, pad(TRAIN[:2]).flatten(), *TRAIN]).tolist()


def test_padding_segments_are_marked():
    lp = torch.full((1, 10), -1.0)
    mask = torch.tensor([1] * 4 + [0] * 6)
    many = packed(lp, lp, mask=mask[None], cu_seqlens=torch.tensor([0, 4, 7, 10]), num_padding=6)
    assert many["segment_is_pad"].tolist() == [False, True, True]
    tail = packed(lp, lp, mask=mask[None], cu_seqlens=torch.tensor([0, 4]))
    assert (tail["cu_seqlens"].tolist(), tail["segment_is_pad"].tolist()) == ([0, 4, 10], [False, True])
    none = packed(lp, lp, mask=mask[None], cu_seqlens=torch.tensor([0, 10]))
    assert none["segment_is_pad"].tolist() == [False]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda lp: packed(lp, lp, cu_seqlens=CU), "mask or labels"),
        (lambda lp: packed(lp, lp, mask=lp, labels=lp, cu_seqlens=CU), "mask or labels"),
        (lambda lp: packed(lp, lp, mask=lp), "cu_seqlens or seq_lens"),
        (lambda lp: packed(lp, lp[:, :-1], mask=lp, cu_seqlens=CU), "rollout_logprobs"),
        (lambda lp: packed(lp, lp, mask=lp, cu_seqlens=torch.tensor([0, 9])), "inside 8 positions"),
        (lambda lp: padded(lp[0], lp[0], lp[0]), r"\[B, L\]"),
        (lambda lp: padded(lp, lp, lp, lengths=[9]), "lengths of 0 to 8"),
        (lambda lp: padded(lp, lp, lp, lengths=[7]), "valid ones"),
        (lambda lp: responses([], [], []), "at least one response"),
        (lambda lp: responses([lp[0]], [lp[0][:3]], [lp[0]]), "lengths"),
        (lambda lp: join_parts([lp, lp[:, :3]]), "one shape"),
        (lambda lp: join_parts([]), "one shape"),
        (lambda lp: join_packs([]), "at least one pack"),
    ],
)
def test_what_does_not_go_together_is_refused(call, problem):
    with pytest.raises(UsageError, match=problem):
        call(torch.full((1, 8), -1.0))


def test_a_step_of_micro_batches(tmp_path):
    with StepDump(tmp_path, rank=1, world_size=2, trainer="demo") as dump:
        for step in (4, 5):
            for _ in range(3):
                dump.add(responses(TRAIN, ROLLOUT, MASK))
            assert dump.end_step(step, {"loss": torch.tensor(0.5)}).name == "rank_00001.safetensors"
        assert dump.end_step(6) is None  # nothing was added
    found = scan(tmp_path, allow_partial=True).shards
    assert [(info.step, info.rank, info.segments) for info in found] == [(4, 1, 9), (5, 1, 9)]
    with open_shard(found[0]) as shard:
        assert shard.pack_offsets().tolist() == [0, 8, 16, 24]


def test_what_the_trainer_does_afterwards_does_not_reach_the_dump(tmp_path):
    """xtuner writes its rejections into the labels; the copy is made before."""
    train, mask = torch.cat(TRAIN), torch.cat(MASK)
    with StepDump(tmp_path) as dump:
        dump.add(packed(train, train, mask=mask, cu_seqlens=CU))
        train.zero_()
        mask.zero_()
        dump.end_step(0)
    (info,) = scan(tmp_path).shards
    with open_shard(info) as shard:
        assert shard.read("train", 0, 8).tolist() == torch.cat(TRAIN).tolist()
        assert int(shard.read("mask", 0, 8).sum()) == 5


def test_ranks_with_copies_write_nothing(tmp_path):
    with StepDump(
        tmp_path / "dump", rank=3, world_size=2, owner=False
    ) as dump:  # a rank outside the owners is no error
        assert not dump.wants(0)
        dump.add(responses(TRAIN, ROLLOUT, MASK))
        assert dump.end_step(0) is None
    assert not (tmp_path / "dump").exists()


def test_every_n_steps(tmp_path):
    with StepDump(tmp_path, every=10) as dump:
        written = []
        for step in range(25):
            assert dump.wants(step) == (step % 10 == 0)
            dump.add(responses(TRAIN, ROLLOUT, MASK))
            written.append(dump.end_step(step))
    assert [path is not None for path in written] == [step % 10 == 0 for step in range(25)]
    assert [info.step for info in scan(tmp_path).shards] == [0, 10, 20]


def test_a_byte_budget_leaves_whole_sequences_out(tmp_path):
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 40, 200)
    train = [torch.full((int(n),), -float(i + 1)) for i, n in enumerate(lengths)]
    columns = responses(train, train, [t < 0 for t in train], rewards=torch.arange(200.0))
    seen = set()
    for step in range(0, 400, 10):
        cut, kept, total = thin(columns, 9000, step)
        size = sum(c.numel() * c.element_size() for name, c in cut.items() if name != "cu_seqlens")
        assert (total, cut["cu_seqlens"].numel() - 1) == (200, kept)
        assert size < 9000 * 1.3
        values = [int(-cut["train_logprobs"][a]) - 1 for a in cut["cu_seqlens"][:-1]]
        assert values == cut["rewards"].int().tolist()  # a whole sequence with its own reward
        assert (cut["cu_seqlens"][1:] - cut["cu_seqlens"][:-1]).tolist() == lengths[values].tolist()
        seen |= set(values)
    assert len(seen) > 0.9 * 200  # other sequences at other steps
    with StepDump(tmp_path, max_bytes=9000) as dump:
        dump.add(columns)
        dump.end_step(0)
    (info,) = scan(tmp_path).shards
    assert info.metadata["sampled"] == f"{info.segments} of 200 sequences"


def test_a_budget_below_one_sequence_keeps_one():
    columns = responses(TRAIN, ROLLOUT, MASK)
    cut, kept, total = thin(columns, 1, step=1)
    assert (kept, total) == (1, 3)
    assert cut["train_logprobs"].tolist() in [train.tolist() for train in TRAIN]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")
def test_cuda_tensors(tmp_path):
    def on_gpu(columns):
        return [column.cuda() for column in columns]

    assert sequences(responses(on_gpu(TRAIN), on_gpu(ROLLOUT), on_gpu(MASK)), tmp_path / "a") == WANTED
    found = padded(pad(TRAIN).cuda(), pad(ROLLOUT).cuda(), pad(MASK).cuda(), lengths=torch.tensor(LENGTHS).cuda())
    assert sequences(found, tmp_path / "b") == WANTED
    found = packed(torch.cat(TRAIN).cuda(), torch.cat(ROLLOUT).cuda(), labels=labels()[0].cuda(), cu_seqlens=CU.cuda())
    assert sequences(found, tmp_path / "c") == WANTED


def test_masks_from_labels():
    assert mask_from_labels(torch.tensor([-100, 0, 7])).tolist() == [False, True, True]
